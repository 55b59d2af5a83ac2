"""Caches of transformers as trees of tensors, whose first dimension is a batch's rows.

Caches are objects with lists, dicts and tensors of many classes. What can be done with rows of any
of them: take some out, and put several together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

#: Tensors with a number for each token in their last dimension but one.
_BY_TOKEN = {"keys", "values", "encoder"}
#: A cache, or an encoder's output, that is as long as what the encoder has read.
_OF_ENCODER = {"cross_attention_cache", "encoder"}
#: A count of a layer's tokens, padding included.
_COUNT = "cumulative_length"

_Change = Callable[[list[torch.Tensor], str, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Widths:
    """Tokens of the longest row: of its text, and of what its encoder has read."""

    text: int
    encoded: int


def selected(tree: Any, rows: Sequence[int], widths: Widths) -> Any:
    """Some rows, without the padding at the left that is more than these need."""

    def change(parts: list[torch.Tensor], name: str, width: int) -> torch.Tensor:
        index = torch.tensor(rows, device=parts[0].device)
        chosen = parts[0].index_select(0, index)
        if name in _BY_TOKEN and chosen.shape[-2] > width:
            chosen = chosen[..., -width:, :].contiguous()
        return chosen

    return _changed([tree], change, widths)


def joined(trees: Sequence[Any], widths: Widths) -> Any:
    """All rows in one tree; shorter ones get zeros at the left."""

    def change(parts: list[torch.Tensor], name: str, width: int) -> torch.Tensor:
        del width
        if name in _BY_TOKEN:
            longest = max(part.shape[-2] for part in parts)
            parts = [functional.pad(p, (0, 0, longest - p.shape[-2], 0)) for p in parts]
        return torch.cat(parts)

    return _changed(list(trees), change, widths)


def tensor_bytes(tree: Any) -> int:
    """Bytes of all its tensors."""
    total = 0

    def change(parts: list[torch.Tensor], name: str, width: int) -> torch.Tensor:
        nonlocal total
        total += parts[0].nbytes
        return parts[0]

    _changed([tree], change, Widths(0, 0))
    return total


def _changed(
    parts: list[Any], change: _Change, widths: Widths, name: str = "", *, of_encoder: bool = False
) -> Any:
    """The trees, which are alike, as one, with `change` of each of their tensors."""
    first = parts[0]
    of_encoder = of_encoder or name in _OF_ENCODER
    width = widths.encoded if of_encoder else widths.text

    def below(children: list[Any], key: str) -> Any:
        return _changed(children, change, widths, key, of_encoder=of_encoder)

    if isinstance(first, torch.Tensor):
        return change(parts, name, width) if first.ndim > 1 else first
    if isinstance(first, dict):
        return {k: below([part[k] for part in parts], str(k)) for k in first}
    if isinstance(first, list | tuple):
        return type(first)(below(list(each), name) for each in zip(*parts, strict=True))
    if _is_cache(first):
        made = copy.copy(first)
        for key in vars(first):
            setattr(made, key, below([getattr(part, key) for part in parts], key))
        return made
    return width if name == _COUNT else first


def _is_cache(thing: object) -> bool:
    kinds = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
    return isinstance(thing, kinds) or type(thing).__name__.endswith("Cache")
