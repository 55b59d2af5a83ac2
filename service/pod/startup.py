"""How long a pod's engines may take to start, and what they wait for."""

from __future__ import annotations

import asyncio
import logging
import time

log = logging.getLogger("tokenpod")

_PAUSE_SECONDS = 0.3


class GroupStartup:
    """The time that a pod has to start its group of ranks, or to load if it is alone.

    Args:
        seconds: from the start, or from the loss of a rank, until all is there (--start-timeout).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting = ""
        #: Seconds that it took the last time.
        self.took = 0.0
        self.begin()

    def begin(self) -> None:
        """The time runs from now."""
        self._began = time.monotonic()
        self._deadline = self._began + self._seconds
        self._waiting = ""

    def done(self) -> None:
        """All is there."""
        self.took = time.monotonic() - self._began
        self._waiting = ""

    @property
    def left(self) -> float:
        """Seconds."""
        return max(self._deadline - time.monotonic(), 0.0)

    @property
    def too_long(self) -> str:
        """One line for the operator."""
        text = f"the model was not ready within {self._seconds:g} s (--start-timeout)"
        return f"{text}: {self._waiting}" if self._waiting else text

    def wait_for(self, reason: str) -> None:
        """What a rank waits for."""
        if reason != self._waiting:
            self._waiting = reason
            log.info("group start-up", extra={"reason": reason})

    async def try_again(self, reason: str) -> None:
        """An attempt has failed: pause before the next."""
        log.warning("the group did not form; trying again", extra={"reason": reason})
        self._waiting = reason
        await asyncio.sleep(_PAUSE_SECONDS)
