"""Copies between a GPU's KV pool and the host's memory, beside the steps.

    the steps' queue:   await | gather into staging |  step n  |  ...  | await | a step that reads
                                         |                             ^
    the copies' queue:                   +--> to the host              |
                                 from the host --> staging --> slots --+

What goes out is gathered on the device before the step that may overwrite it, which takes as long
as reading it; the way to the host runs beside that step and the next ones. What comes in goes to
slots that no step reads before a plan awaits it. So no step waits for a copy that it does not need,
but for room in the staging memory where very much goes out at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from tokenpod.core.capacity import STAGING_BYTES, STAGING_PIECES
from tokenpod.core.plan import StepPlan
from tokenpod.engine.steps.mailbox import upload
from tokenpod.engine.steps.offload_copies import OffloadCopies
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.offload_pool import OffloadPool
from tokenpod.kernels.cache.slot_copies import SlotRows

#: Pieces of staging memory for what goes out; what comes in has one.
PIECES = STAGING_PIECES - 1


class DeviceCopies(OffloadCopies):
    """Makes a plan's copies on a GPU, in a queue of their own.

    Args:
        device: a GPU. (A CPU will do where kernels are interpreted: tests.)
    """

    def __init__(self, pools: Sequence[KVPool], offload: OffloadPool, device: torch.device) -> None:
        super().__init__(pools, offload)
        self._device = device
        self._queue: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._queue = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        #: Of copies that come in: the step, and when they are there.
        self._coming: deque[tuple[int, _Moment]] = deque()
        slot_bytes = offload.rows.shape[1]
        piece = min(max(STAGING_BYTES // slot_bytes, 1), offload.slots)
        shape = (PIECES + 1, piece, slot_bytes)
        self._pieces = [*torch.empty(shape, dtype=torch.uint8, device=device)]
        #: When each piece that things go out by is free again.
        self._free = [_Moment(device) for _ in range(PIECES)]
        self._turn = 0
        self.use(pools)

    def use(self, pools: Sequence[KVPool]) -> None:
        """Keep keys and values there from now on."""
        self._take(pools)
        assert SlotRows.can_move(self._stored), "tokens of the pool are no whole words"
        self._slots = SlotRows(self._stored)

    def begin(self, plan: StepPlan) -> None:
        """Queue the copies of a plan, and let its step wait for those that it relies on."""
        behind = int(plan.awaited[0]) if len(plan.awaited) else None
        if behind is not None:
            self._await(plan.step - behind)
        before = len(self._coming)
        super().begin(plan)
        if len(self._coming) > before and behind == 0:
            self._await(plan.step)

    def arrived(self) -> int | None:
        """The last step whose copies from main memory are there; None: all are."""
        while self._coming and self._coming[0][1].passed:
            self._coming.popleft()
        return self._coming[0][0] - 1 if self._coming else None

    # -- parts ---------------------------------------------------------------------------------

    def _await(self, step: int) -> None:
        """Nothing that is queued from now on runs before the copies of steps up to this one."""
        while self._coming and self._coming[0][0] <= step:
            _, moment = self._coming.popleft()
            moment.wait()

    def _go_out(self, slots: torch.Tensor, offload_slots: np.ndarray) -> None:
        for first, end in _pieces_of(len(slots), len(self._pieces[0])):
            which = self._turn % PIECES
            self._turn += 1
            # Room: what went out by this piece before has gone.
            self._free[which].wait()
            piece = self._pieces[which][: end - first]
            self._slots.gather(slots[first:end], piece)
            gathered = _Moment(self._device)
            gathered.record()
            with self._beside():
                gathered.wait()
                for at, to, n in _runs(offload_slots[first:end]):
                    self._offload.rows[to : to + n].copy_(piece[at : at + n], non_blocking=True)
                self._free[which].record()

    def _come_in(self, offload_slots: np.ndarray, slots: np.ndarray, step: int) -> None:
        # Steps before this one may have read these slots for others.
        queued, there = _Moment(self._device), _Moment(self._device)
        queued.record()
        with self._beside():
            queued.wait()
            targets = self._indices(slots)
            for first, end in _pieces_of(len(slots), len(self._pieces[0])):
                piece = self._pieces[PIECES][: end - first]
                for to, at, n in _runs(offload_slots[first:end]):
                    piece[to : to + n].copy_(self._offload.rows[at : at + n], non_blocking=True)
                self._slots.scatter(piece, targets[first:end])
            there.record()
        self._coming.append((step, there))

    def _indices(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self._device)

    def _beside(self) -> AbstractContextManager[object]:
        """What is queued within goes to the copies' queue."""
        return nullcontext() if self._queue is None else torch.cuda.stream(self._queue)


class _Moment:
    """A point in the queue in which it was recorded; none was: it has passed."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Let the current queue wait, not the host."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    @property
    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


def _pieces_of(n: int, most: int) -> Iterator[tuple[int, int]]:
    """The first and the end of each piece of `n` things, `most` at a time."""
    return ((first, min(first + most, n)) for first in range(0, n, most))


def _runs(slots: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Adjacent host slots: where they begin in `slots` [n], which the first one is, how many."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    for part in np.split(np.arange(len(slots)), breaks):
        if len(part):
            yield int(part[0]), int(slots[part[0]]), len(part)
