"""Reads of a file in pieces, by several threads.

What costs time is copying, and memory that is touched for the first time: one thread fills neither
a disk's bandwidth nor a memory's.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

import torch

#: Bytes that are read at once, and on their way to a GPU: a thread that has more to do meanwhile
#: is asked less often.
PIECE_BYTES = 4 << 20
PINNED_BYTES = 8 << 20
#: Threads, and a thread's pieces on their way elsewhere.
READERS, UNDER_WAY = 8, 4


class Pieces:
    """Reads tensors' bytes from files, and holds the memory that some pass through.

    Args:
        readers: threads that read; None: the caller's alone.
    """

    def __init__(self, readers: Executor | None = None) -> None:
        self._readers = readers
        self._own = threading.local()

    def fill(self, file: int, target: torch.Tensor, start: int) -> None:
        """Fill `target`, contiguous on a CPU, with a file's bytes from `start` on.

        Raises OSError, and EOFError where the file ends before.
        """
        whole = target.reshape(-1).view(torch.uint8)
        reads = [
            self._begin(file, whole[at : at + PIECE_BYTES], start + at)
            for at in range(0, len(whole), PIECE_BYTES)
        ]
        for wait in reads:
            wait()

    def copy(
        self,
        file: int,
        target: torch.Tensor,
        start: int,
        dtype: torch.dtype,
        row: tuple[int, ...],
        columns: range | None = None,
    ) -> None:
        """The same into another dtype or device; the next pieces are read while one is copied.

        Args:
            file: open for reading.
            target: [rows, *row], or [rows, len(columns), *row[1:]].
            start: the byte at which its first row begins.
            dtype: of the numbers in the file.
            row: shape of a row there.
            columns: of each row; None: all.

        Raises:
            OSError: it can't be read.
            EOFError: it ends before.
        """
        width = math.prod(row) * dtype.itemsize
        count = max((PINNED_BYTES if target.is_cuda else PIECE_BYTES) // width, 1)
        under_way: deque[Callable[[], None]] = deque()
        for number, begin in enumerate(range(0, len(target), count)):
            if len(under_way) == UNDER_WAY:
                under_way.popleft()()
            part = target[begin : begin + count]
            scratch = self._scratch_at(number % UNDER_WAY)
            piece = scratch.bytes(len(part) * width, pinned=target.is_cuda)
            wait = self._begin(file, piece, start + begin * width)
            rows = piece.view(dtype).view(len(part), *row)
            kept = rows if columns is None else rows[:, columns.start : columns.stop]
            under_way.append(_then_copied(wait, part, kept, scratch))
        for each in under_way:
            each()

    def _scratch_at(self, index: int) -> _Scratch:
        """Of the calling thread."""
        own: list[_Scratch] = self._own.__dict__.setdefault("scratch", [])
        while len(own) <= index:
            own.append(_Scratch())
        return own[index]

    def _begin(self, file: int, piece: torch.Tensor, start: int) -> Callable[[], None]:
        """Read a piece, here or in a thread; the result waits for it, and raises what it raised."""
        if self._readers is None:
            _read(file, piece, start)
            return _nothing
        return self._readers.submit(_read, file, piece, start).result


class _Scratch:
    """Memory for one piece on its way to another device or dtype."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def bytes(self, size: int, *, pinned: bool) -> torch.Tensor:
        """So many, once what was there before has been copied."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if len(self._memory) < size:
            self._memory = torch.empty(max(size, PIECE_BYTES), dtype=torch.uint8, pin_memory=pinned)
        return self._memory[:size]

    def note_copy(self, device: torch.device) -> None:
        """The bytes are being copied to a device."""
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))


def _then_copied(
    wait: Callable[[], None], part: torch.Tensor, rows: torch.Tensor, scratch: _Scratch
) -> Callable[[], None]:
    def arrive() -> None:
        wait()
        part.copy_(rows, non_blocking=True)
        scratch.note_copy(part.device)

    return arrive


def _read(file: int, piece: torch.Tensor, start: int) -> None:
    """Without holding the interpreter's lock. Raises EOFError where the file ends before."""
    left = piece.numpy().data
    while left:
        done = os.preadv(file, [left], start)
        if not done:
            raise EOFError
        left, start = left[done:], start + done


def _nothing() -> None:
    """There is nothing to wait for."""
