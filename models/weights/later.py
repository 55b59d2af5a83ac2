"""Weights that are read by a thread while the model that has them is made and warmed up."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

#: Threads, so that some read while others wait for the last piece of a weight.
WORKERS = 3


class Later:
    """Reads of large weights of a GPU, which are zeros until `wait` has returned.

    Who makes layers, runs the largest steps or captures takes no notice of their numbers.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reads: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        #: When all had been read, by `time.monotonic`; 0.0: they have not been, or there are none.
        self.ended = 0.0

    def add(self, read: Callable[[], None]) -> None:
        """Have `read` called by some thread, in a stream of its own, once they have begun."""
        self._reads.append(read)

    def begin(self, files: ExitStack) -> None:
        """Read now what was added, and close `files` behind it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what is there is zeros
        # Who fails meanwhile does not wait for it.
        self._thread = threading.Thread(
            target=self._read_all, args=[files], name="weights", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until all are read. Raises ModelError, or whatever else reading raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _read_all(self, files: ExitStack) -> None:
        try:
            with files, ThreadPoolExecutor(WORKERS, "weights") as workers:
                for each in [workers.submit(self._read_some) for _ in range(WORKERS)]:
                    each.result()
            self.ended = time.monotonic()
        except BaseException as error:
            self._error = error

    def _read_some(self) -> None:
        """Raises what a read raises, and then no other is begun."""
        own = None
        if self._device.type == "cuda":
            own = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(own):
                while (read := self._next()) is not None:
                    read()
        except BaseException:
            self._reads.clear()
            raise
        if own is not None:
            own.synchronize()

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._reads.popleft()
        except IndexError:
            return None
