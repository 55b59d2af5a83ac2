"""Signals that ask a server to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal


class Stopping:
    """SIGTERM or SIGINT: the first asks to stop, the second to stop at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[object] | None = None

    @classmethod
    def by_signals(cls) -> Stopping:
        """Asked by the signals of this process."""
        stopping = cls()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.signal)
        return stopping

    def signal(self) -> None:
        """A signal has come."""
        if self._asked.is_set():
            self._urgent.set()
        self._asked.set()

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
