"""Rows and token slots of the fake shard: first come, first served, whoever comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from router.fake_sequence import Sequence


class Rows:
    """Who runs, who waits. Of those that wait the first that does not fit blocks the rest."""

    def __init__(self, rows: int, slots: int) -> None:
        self.slots = slots
        self._rows = rows
        self._running: set[Sequence] = set()
        self._waiting: deque[Sequence] = deque()
        self._taken_rows = 0
        self._taken_slots = 0
        self._changed = asyncio.Event()

    def queue(self, sequences: Iterable[Sequence]) -> None:
        self._waiting.extend(sequences)

    def admit(self) -> None:
        """Give rows to those at the head of the queue, as long as they fit."""
        while self._waiting:
            head = self._waiting[0]
            if len(self._running) + self._taken_rows == self._rows:
                return
            if self._taken_slots + head.bound > self.slots:
                return
            self._waiting.popleft()
            self._running.add(head)
            self._taken_slots += head.bound
            head.has_row = True

    def release(self, sequences: Iterable[Sequence]) -> None:
        """These have stopped, or nobody wants them."""
        for sequence in sequences:
            if sequence.has_row:
                sequence.has_row = False
                self._running.remove(sequence)
                self._taken_slots -= sequence.bound
            elif not sequence.stopped:
                self._waiting.remove(sequence)
        self.notify()

    def occupy(self, rows: int) -> Callable[[], None]:
        """Take rows as `Generate` callers do; call the result to give them back."""
        self._taken_rows += rows

        def leave() -> None:
            self._taken_rows -= rows
            self.notify()

        return leave

    def notify(self) -> None:
        """Wake everybody that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        await self._changed.wait()
