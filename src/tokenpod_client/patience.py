"""How long a call may take, and when it is tried again."""

from __future__ import annotations

import random
import time

import grpc

from tokenpod_client.errors import ServerError

#: Seconds before a second try where the transport failed and no server has said when; doubled for
#: each further one.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Patience:
    """One call's tries.

    A server that can't take a call says when it wants it again, and has not begun it. What it
    refuses without such a hint is not tried again, unless the connection failed.

    Args:
        attempts: tries in all.
        deadline: seconds for all of them; None: no bound.
    """

    def __init__(self, attempts: int, deadline: float | None) -> None:
        self._left = attempts - 1
        self._pause = _FIRST_PAUSE
        self._until = None if deadline is None else time.monotonic() + deadline

    @property
    def seconds(self) -> float | None:
        """What is left of the deadline."""
        return None if self._until is None else max(self._until - time.monotonic(), 0.0)

    def pause(self, error: ServerError) -> float | None:
        """Seconds to wait before the next try; None: there is none."""
        wait = error.retry_after
        if wait is None and error.code is grpc.StatusCode.UNAVAILABLE:
            wait = self._pause * random.uniform(0.8, 1.2)  # noqa: S311 (spreads clients, no secret)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        left = self.seconds
        if wait is None or self._left < 1 or (left is not None and wait >= left):
            return None
        self._left -= 1
        return wait
