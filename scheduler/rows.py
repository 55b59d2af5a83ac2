"""The executor's rows: who has which."""

from __future__ import annotations

from tokenpod.scheduler.sequence import Sequence


class Rows:
    """Rows 0 to total - 1, the lowest free one first; row `total` is kept for liveness probes."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._probing = False
        self._free = list(range(total - 1, -1, -1))
        self._promised = 0
        self._fresh: list[Sequence] = []
        self._freed: list[int] = []

    @property
    def free(self) -> int:
        """Rows that nobody has and nobody was promised."""
        return len(self._free) - self._promised

    @property
    def probing(self) -> bool:
        """Whether a probe has the row that is kept for it."""
        return self._probing

    @property
    def promised(self) -> int:
        """Rows that are kept for somebody."""
        return self._promised

    @property
    def in_use(self) -> int:
        """Rows that somebody has."""
        return self._total - len(self._free) + self._probing

    def promise(self, n: int) -> None:
        """Keep `n` free rows for later; a negative `n` withdraws promises."""
        self._promised += n

    def give(self, sequence: Sequence) -> None:
        """Give a sequence a row."""
        sequence.row = self._free.pop()
        self._fresh.append(sequence)

    def give_probe(self, sequence: Sequence) -> None:
        """Give a liveness probe the row that is kept for it."""
        assert not self._probing, "probes take turns"
        self._probing = True
        sequence.row = self._total
        self._fresh.append(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Take a sequence's row back, if it has one."""
        if sequence.row < 0:
            return
        if sequence in self._fresh:
            self._fresh.remove(sequence)
        else:
            self._freed.append(sequence.row)
        if sequence.row == self._total:
            self._probing = False
        else:
            self._free.append(sequence.row)
        sequence.row = -1

    def take_fresh(self) -> list[Sequence]:
        """Sequences that got a row since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def take_freed(self) -> list[int]:
        """Rows that were given back since the last call."""
        freed, self._freed = self._freed, []
        return freed
