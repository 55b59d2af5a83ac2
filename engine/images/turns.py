"""How a tower computes in parts, between the steps of streams.

    step loop     step n | grant(9 pieces) ........ | step n + 1 | grant(9 pieces) ... | step n + 2
    thread        reads    computes pieces, pauses                computes pieces
                  files    ^ the loop waits meanwhile: one of the two works at a time

A piece is what a tower computes from the begin of one of its layers to that of the next.
"""

from __future__ import annotations

import time
from collections import deque
from threading import Semaphore

from tokenpod.engine.steps.mailbox import Mark


class Turns:
    """Lets a thread work for a while, as the step loop grants it.

    Args:
        on_gpu: whether the thread's work is queued to a GPU, which takes the time.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._go, self._back = Semaphore(0), Semaphore(0)
        #: Whether the thread waits for a grant, and the numbers of the image that it computes.
        self.waiting, self._size = False, 0
        self._done = self._granted = 0
        self._times = PieceTimes()
        #: Grants whose end the device has not reached yet: begin, end, pieces, numbers, and how
        #: many nanoseconds the host took to queue them.
        self._under_way: deque[tuple[Mark, Mark, int, int, int]] = deque()

    # -- the thread ----------------------------------------------------------------------------

    def begin(self, size: int) -> None:
        """Wait for the first grant for an image of so many numbers."""
        self._size = size
        self.waiting = True
        self._go.acquire()

    def piece(self) -> None:
        """A piece has been computed, or queued: wait if as many have been as were granted."""
        self._done += 1
        if self._granted and self._done >= self._granted:
            self.waiting = True
            self._back.release()
            self._go.acquire()

    def end(self) -> None:
        """The image has been computed, or has failed."""
        self._done += 1
        self._back.release()

    # -- the step loop -------------------------------------------------------------------------

    def grant(self, most: int | None) -> None:
        """Let the thread, which waits, compute for about so many nanoseconds, at least a piece.

        Returns when it has, or when it has queued what will take so long. None: all of the image.
        """
        self._note()
        self._done, self._granted = 0, self._times.pieces(self._size, most)
        began, ended = Mark(self._on_gpu), Mark(self._on_gpu)
        began.record()
        self.waiting = False
        size, began_at = self._size, time.monotonic_ns()
        self._go.release()
        self._back.acquire()
        ended.record()
        queued = time.monotonic_ns() - began_at
        self._under_way.append((began, ended, self._done, size, queued))

    def _note(self) -> None:
        while self._under_way and self._under_way[0][1].passed:
            began, ended, pieces, size, queued = self._under_way.popleft()
            # Many small launches take the host longer than they take the device.
            self._times.note(size, pieces, max(queued, began.nanoseconds_to(ended)))


class PieceTimes:
    """What a piece of an image takes, by the image's numbers."""

    def __init__(self) -> None:
        #: Nanoseconds of the last pieces of images of 2**k to 2**(k + 1) - 1 numbers, at k.
        self._seen: dict[int, int] = {}

    def note(self, size: int, pieces: int, took: int) -> None:
        """So many pieces took so many nanoseconds."""
        self._seen[size.bit_length()] = max(took // pieces, 1)

    def pieces(self, size: int, most: int | None) -> int:
        """How many of an image take so many nanoseconds, at least 1; 0: all of them.

        The unknown size takes what the next larger one does, or, where all are smaller, what
        attention makes of the next smaller one: four times as much for twice the numbers.
        """
        if most is None:
            return 0
        at = size.bit_length()
        if not self._seen:
            return 1
        near = min((k for k in self._seen if k >= at), default=max(self._seen))
        each = self._seen[near] << 2 * max(at - near, 0)
        return max(most // each, 1)
