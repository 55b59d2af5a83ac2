"""To wait for what comes to hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(
    condition: Callable[[], Found], seconds: float = 60.0, *, log: Path | None = None
) -> Found:
    """What the condition returns as soon as that is true.

    Raises:
        AssertionError: it was not for so long; with what is in `log`.
        Exception: what the condition raised when the time was over. Until then it may raise: a
            server that is asked may not be there yet.
    """
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline
        try:
            if found := condition():
                return found
        except Exception:
            if late:
                raise
        assert not late, log.read_text() if log else "it did not happen"
        time.sleep(0.02)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """The same for what happens beside it on the loop. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - nobody signals it
            await asyncio.sleep(0.01)
