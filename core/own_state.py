"""What sequences take of models that keep their states by themselves: arithmetic, without torch."""

from __future__ import annotations

from dataclasses import dataclass

#: Up to half of a batch of states that grow with their texts is padding.
_PADDING = 2
#: Bytes of a token's id, which states that don't grow with texts cost all the same.
_LEAST_SLOT = 8


@dataclass(frozen=True, slots=True)
class OwnState:
    """What a model says that keeps sequences' states by itself, row by row."""

    #: Bytes of a running row's state, whatever its length.
    row_bytes: int
    #: More for each of its tokens.
    token_bytes: int
    #: Whether prompts' tokens have log probabilities: those that an encoder reads have none.
    scores_prompts: bool = True
    #: Of all states, at once: 2 where batches of them are made anew when others join.
    copies: int = 2

    @property
    def slot_bytes(self) -> int:
        """Memory to be reckoned with for a token."""
        return max(self.copies * _PADDING * self.token_bytes, _LEAST_SLOT)

    def rows(self, free: int, fraction: float, most: int) -> int:
        """Sequences that can run at once, beside a liveness probe's row; less than 1: none can.

        Args:
            free: bytes that there are; if texts take some too, states get half of what is used.
            fraction: share of them that may be used.
            most: rows that are asked for.
        """
        if not self.row_bytes:
            return most
        usable = int(free * fraction) // (2 if self.token_bytes else 1)
        return min(usable // (self.copies * self.row_bytes) - 1, most)

    def taken(self, rows: int, fraction: float) -> int:
        """Bytes that are no longer free for texts, of which `fraction` may be used too."""
        return int((rows + 1) * self.copies * self.row_bytes / fraction)
