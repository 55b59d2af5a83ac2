"""What is known of every head that drafts: EAGLE-3's (`eagle`), and layers for it (`mtp`)."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.kernels.cache.kv_pool import KVLayout
from tokenpod.models.specs.spec import ModelSpec


@dataclass(frozen=True)
class HeadSpec:
    """A layer that guesses from the served model's features."""

    #: With this layer in the place of all others.
    decoder: ModelSpec

    @property
    def architecture(self) -> str:
        """As config.json names it."""
        return self.decoder.architecture

    @property
    def vocab_size(self) -> int:
        """Tokens of the served model."""
        return self.decoder.vocab_size

    @property
    def max_positions(self) -> int:
        """Positions that it can address."""
        return self.decoder.max_positions

    @property
    def runs_on(self) -> str:
        """Whose code computes it."""
        return "tokenpod"

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """What the layer keeps of an entry, and, in the place of a layer's keys, its feature."""
        width = self.decoder.hidden_size
        return (*self.decoder.kv_layouts, KVLayout(1, width, 1, shared=True))

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """All of it is kept: it is little."""
        return (None,) * len(self.kv_layouts)
