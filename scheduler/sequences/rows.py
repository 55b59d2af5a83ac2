"""The executor's rows, and which sequence has which."""

from __future__ import annotations

from collections.abc import Iterable

from tokenpod.scheduler.sequences.sequence import Sequence


class Rows:
    """Rows 0 to total - 1, the lowest free one first; row `total` is for liveness probes.

    Args:
        total: sequences that can have a row at once, without a probe's.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._probing = False
        self._free = list(range(total - 1, -1, -1))
        self._promised = 0
        self._fresh: list[Sequence] = []
        self._renewed: list[Sequence] = []
        self._freed: list[int] = []

    @property
    def free(self) -> int:
        """Rows that no sequence has or was promised."""
        return len(self._free) - self._promised

    def promise(self, n: int) -> None:
        """Promise `n` free rows; a negative `n` withdraws promises."""
        self._promised += n

    def give(self, sequence: Sequence) -> None:
        """Give a sequence a row."""
        sequence.row = self._free.pop()
        self._fresh.append(sequence)

    def renew(self, sequence: Sequence) -> None:
        """Its row begins anew, with what the sequence has then."""
        if sequence not in self._fresh:
            self._renewed.append(sequence)

    def give_probe(self, sequence: Sequence) -> None:
        """Give a liveness probe the row that is reserved for it."""
        assert not self._probing, "one probe at a time"
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
            if sequence in self._renewed:
                self._renewed.remove(sequence)
        if sequence.row == self._total:
            self._probing = False
        else:
            self._free.append(sequence.row)
        sequence.row = -1

    def take_fresh(self) -> list[Sequence]:
        """Sequences that got a row since the last call, or whose row begins anew."""
        fresh, self._fresh, self._renewed = self._fresh + self._renewed, [], []
        return fresh

    def take_freed(self) -> list[int]:
        """Rows that were given back since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every row is free or has one of these sequences."""
        taken = self._total - len(self._free) + self._probing
        assert taken == sum(sequence.row >= 0 for sequence in sequences), taken
        assert self._promised <= len(self._free), (self._promised, len(self._free))
