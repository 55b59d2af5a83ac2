"""What is known of a model that transformers computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenpod.core.model_size import Expansion
from tokenpod.core.own_state import OwnState
from tokenpod.kernels.cache.kv_pool import KVLayout


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What is known of a model that transformers computes: `facts.ModelFacts`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    #: Of the widest product, over the experts that a token chooses.
    widest: int
    kv_layouts: tuple[KVLayout, ...]
    head_counts: tuple[int, ...]
    #: How many positions back each layer sees; None: all.
    windows: tuple[int | None, ...]
    dtype: torch.dtype | None
    eos_token_ids: frozenset[int]
    rope_variant: str = ""
    runs_on: str = "transformers"
    own_state: OwnState | None = None
    encodes: bool = False
    second_text: int = 0
    expansion: Expansion | None = None
    own_positions: bool = False
    mutual: int = 0
    mutual_prompts: bool = False

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Its layers keep all tokens: masks of transformers' layers are read as they are."""
        return (None,) * len(self.kv_layouts)

    @property
    def sliding_window(self) -> int | None:
        """The furthest that any layer looks back; None if one sees everything."""
        reach = [window for window in self.windows if window is not None]
        return max(reach) if len(reach) == len(self.windows) else None

    def with_state(self, size: OwnState) -> TierSpec:
        """The same, with what its rows keep."""
        return replace(self, own_state=size)
