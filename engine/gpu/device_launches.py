"""What a device's sampler launches, on what, and how the work is cut up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Launches:
    """Which launches a step needs besides those of greedy rows. A captured graph has its own."""

    #: Some row samples.
    draws: bool
    #: Some row wants top tokens.
    tops: bool
    #: Some row wants those of its processed scores.
    processed_tops: bool = False
    #: Some row wants its tokens' ranks.
    ranks: bool = False


class Asked(NamedTuple):
    """What is drawn, and from what; see `DeviceSampler.begin`."""

    logits: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    masks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SamplerTiles:
    """How the work is cut up. Powers of two.

    Tokens may depend on `split` where sums round differently; on the others nothing does.
    """

    #: Tokens of the vocabulary a program reads, at least 64.
    split: int = 2048
    #: Groups of a split whose best scores bound top_k.
    groups: int = 8
    #: Candidates of a truncated row at a time, and keys they are compared with in one pass.
    block: int = 2048
    pivots: int = 4
    warps: int = 4
    finish_warps: int = 16
