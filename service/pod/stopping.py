"""Signals that ask a server to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

log = logging.getLogger("tokenpod")

#: Seconds by which a second signal must come after the first to mean something of its own:
#: wrappers and terminals deliver one Ctrl-C twice within milliseconds.
_SECOND_SECONDS = 1.0
#: Seconds after a second signal in which calls are refused and children end; then the process ends.
_AT_ONCE_SECONDS = 0.8


class Stopping:
    """SIGTERM or SIGINT: the first asks to stop, one a second or more later to stop at once.

    Args:
        at_once: called when it becomes urgent.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        at_once: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at_once = at_once
        #: Whether the first was Ctrl-C: then nobody has to hear of it before the server stops.
        self.interrupted = False
        self._now = now
        self._asked_at = 0.0
        self._asked = asyncio.Event()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[object] | None = None

    @classmethod
    def by_signals(cls) -> Stopping:
        """Asked by the signals of this process, which a second one ends whatever else happens."""
        stopping = cls(_end_soon)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.signal, number)
        return stopping

    def signal(self, number: int = signal.SIGTERM) -> None:
        """A signal has come."""
        if not self._asked.is_set():
            self.interrupted = number == signal.SIGINT
            self._asked_at = self._now()
            self._asked.set()
        elif not self.urgent and self._now() - self._asked_at >= _SECOND_SECONDS:
            self._urgent.set()
            self._at_once()

    def task(self) -> asyncio.Task[object]:
        """Done once asked to stop."""
        if self._task is None:
            self._task = asyncio.create_task(self._asked.wait())
        return self._task

    @property
    def urgent(self) -> bool:
        """Whether to stop at once."""
        return self._urgent.is_set()

    async def sleep(self, seconds: float) -> None:
        """Sleep, unless it becomes urgent."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._urgent.wait(), seconds)


def _end_soon() -> None:
    """End this process after a moment, and with it its children, which die with it.

    Whatever holds up an orderly end: an engine that hangs, a thread in a library, a collector.
    """
    log.warning("a second signal: stopping at once")

    def end() -> None:
        time.sleep(_AT_ONCE_SECONDS)
        os._exit(0)

    threading.Thread(target=end, name="end", daemon=True).start()
