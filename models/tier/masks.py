"""How far back the tokens of a layer see: asked of the mask that transformers would build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenpod.models.tier.errors import NotCausal, NotServed

#: transformers' predicate: (batch, head, query position, key position) -> may it be seen.
Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reach:
    """What a token at position p sees, of positions up to p; without either field, all of them."""

    #: The last `window` of them.
    window: int | None = None
    #: Those with the same position // chunk.
    chunk: int | None = None

    def __getitem__(self, part: object) -> Reach:
        """Of some of the tokens: models cut masks, and what is said here holds for each token."""
        del part
        return self


def describe_mask(
    *, mask_function: Visible, local_size: int | None = None, **unused: Any
) -> Reach | None:
    """What transformers calls to build a mask: says in numbers what the predicate says in code.

    The result takes the mask's way to the attention function. None: on the meta device nothing can
    be asked.

    Raises:
        NotServed: the predicate is none of those that a `Reach` describes.
    """
    del unused
    query, key = _pairs(local_size or 1)
    first = torch.zeros((), dtype=torch.int64)
    try:
        visible = mask_function(first, first, query, key)
    except (IndexError, RuntimeError, NotImplementedError) as error:
        if "meta" in str(error):
            return None
        raise NotServed(f"its mask depends on more than positions ({error})") from None
    if visible.is_meta:
        return None
    reaches = [Reach()]
    if local_size is not None:
        reaches += [Reach(window=local_size), Reach(chunk=local_size)]
    for reach in reaches:
        if torch.equal(visible, _seen(reach, query, key)):
            return reach
    why = "its mask is neither causal, nor a window, nor chunks"
    raise NotCausal(why) if (visible & (key > query)).any() else NotServed(why)


def _pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions around the first multiples of a size, and far ones: all pairs."""
    near = {at + step for at in (0, size, 2 * size, 3 * size, 64) for step in (-1, 0, 1, 2)}
    positions = torch.tensor(sorted(p for p in near if p >= 0))
    return positions[:, None].expand(-1, len(positions)), positions.expand(len(positions), -1)


def _seen(reach: Reach, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    seen = key <= query
    if reach.window is not None:
        seen = seen & (key > query - reach.window)
    if reach.chunk is not None:
        seen = seen & (key // reach.chunk == query // reach.chunk)
    return seen
