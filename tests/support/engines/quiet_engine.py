"""What carries a generation where a test is the engine."""

from __future__ import annotations


class QuietEngine:
    """Notes which sequences are to end; all its steps settle at once."""

    step_at = 1

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def abort(self, sequence_ids: list[int], *, stopped: bool = False) -> None:
        self.aborted += sequence_ids

    def begun(self) -> None:
        """Nobody waits in a queue here."""

    def keeps(self, size: int) -> None:
        """Nobody counts memory here."""
