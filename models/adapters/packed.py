"""Adapters on the host, in the pieces in which they are copied into slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tokenpod.core.adapters import AdapterKind


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """Two factors on the host, as a slot has them, in pieces one behind the other."""

    rank: int
    down: tuple[torch.Tensor, ...]
    up: tuple[torch.Tensor, ...]

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        """Of both."""
        return self.down + self.up


@dataclass(frozen=True, slots=True)
class Packed:
    """An adapter on the host, as a slot has it."""

    rank: int
    digest: str
    #: One behind the other: [rows, numbers] as `targets.slot_shape`, without ranks that it does not
    #: have.
    pieces: tuple[torch.Tensor, ...]
    kind: AdapterKind = AdapterKind.LORA
    virtual_tokens: int = 0
    #: What outputs are multiplied with, in pieces as `scales.Made` has it; none: it scales nothing.
    scale: tuple[torch.Tensor, ...] = ()
    squares: tuple[torch.Tensor, ...] = ()
    #: An embedding and a head of its own, in pieces too.
    copies: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    #: Factors of the base's embedding and head.
    vocabulary: Mapping[str, PackedFactors] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        pieces = [*self.pieces, *self.scale, *self.squares]
        pieces += (piece for own in self.copies.values() for piece in own)
        pieces += (piece for own in self.vocabulary.values() for piece in own.pieces)
        return sum(piece.nbytes for piece in pieces)

    @property
    def largest_rank(self) -> int:
        """Of all its modules."""
        return max(self.rank, *(own.rank for own in self.vocabulary.values()), 0)
