"""What sequences take of models that keep states of rows: arithmetic, without torch."""

from __future__ import annotations

from dataclasses import dataclass

#: Batches of rows' states are made anew when others join: the old and the new are there at once.
_COPIES = 2
#: Up to half of a batch of states that grow with their texts is padding.
_PADDING = 2
#: Bytes of a token's id, which states that don't grow with texts cost all the same.
_LEAST_SLOT = 8
#: Snapshots for each row, at most, and what share of the memory that may be used they take.
_MOST_SNAPSHOTS = 8
_SNAPSHOT_SHARE = 8


@dataclass(frozen=True, slots=True)
class OwnState:
    """What a model says that keeps states of rows."""

    #: Bytes of a running row's state, whatever its length.
    row_bytes: int
    #: More for each of its tokens.
    token_bytes: int
    #: Whether prompts' tokens have log probabilities: those that an encoder reads have none.
    scores_prompts: bool = True
    #: Whether states are in a pool of one size, beside keys and values in slots; else batches of
    #: rows keep all that there is.
    pooled: bool = False
    #: Whether what wrong drafts have done to states can be taken back.
    takes_back: bool = False

    @property
    def slot_bytes(self) -> int:
        """Memory to be reckoned with for a token."""
        return max(_COPIES * _PADDING * self.token_bytes, _LEAST_SLOT)

    def rows(self, free: int, fraction: float, most: int) -> int:
        """Sequences that can run at once, beside a liveness probe's row; less than 1: none can.

        Args:
            free: bytes that there are; if texts take some too, states get half of what is used.
            fraction: share of them that may be used.
            most: rows that are asked for.
        """
        if not self.row_bytes:
            return most
        usable = int(free * fraction) // (2 if self.token_bytes or self.pooled else 1)
        return min(usable // (self._copies * self.row_bytes) - 1, most)

    def snapshots(self, free: int, fraction: float, rows: int) -> int:
        """States that no row has, for prompts to begin with, beside those of so many rows."""
        if not self.pooled:
            return 0
        usable = int(free * fraction)
        left = usable // 2 - (rows + 1) * self.row_bytes
        room = min(usable // _SNAPSHOT_SHARE, left) // self.row_bytes
        return max(min(room, _MOST_SNAPSHOTS * rows), 0)

    def taken(self, rows: int, fraction: float, snapshots: int = 0) -> int:
        """Bytes that are no longer free for texts, of which `fraction` may be used too."""
        return int((rows + 1 + snapshots) * self._copies * self.row_bytes / fraction)

    @property
    def _copies(self) -> int:
        return 1 if self.pooled else _COPIES
