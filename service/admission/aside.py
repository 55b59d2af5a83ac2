"""Work for calls that would hold up the event loop, and that no other process does for them.

It has threads of its own: those of asyncio wait for child processes, whose end must be noticed
whatever callers ask for. Texts, templates and schemas of callers go to the text workers, which can
be killed; here goes what only a server's own files make long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenpod.service.calls.errors import RETRY_SECONDS, ResourceExhausted

#: Pieces of work that may wait or run: a second's, or a few.
_MOST = 512
_THREADS = 2

Result = TypeVar("Result")


class Aside:
    """A few threads, and a bounded line before them.

    Args:
        most: pieces of work at once, waiting and running.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._taken = 0
        self._threads = ThreadPoolExecutor(_THREADS, "aside")

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, or raises. Raises ResourceExhausted at once if too much waits.

        If the caller leaves, what has not begun is dropped.
        """
        if self._taken >= self._most:
            raise ResourceExhausted(
                f"{self._taken} calls of this kind run or wait; this server takes {self._most}",
                limit="side work",
                retry_after=RETRY_SECONDS,
            )
        self._taken += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._taken -= 1
