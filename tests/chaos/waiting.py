"""To wait for something that comes to hold."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Ten times what anything takes here: machines may be slow, and be shared.
PATIENCE_SECONDS = 600.0


def wait_for(
    condition: Callable[[], bool], otherwise: str, seconds: float = PATIENCE_SECONDS
) -> None:
    """Until it holds; AssertionError, in these words, if it does not come to."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
