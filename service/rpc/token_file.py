"""A file of bearer tokens that may change at any time: a mounted secret, or one edited in place."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("tokenpod.rpc")

#: Seconds for which the last good tokens count while the file is empty or can't be read.
KEEP_SECONDS = 60.0
#: A file that has changed within so many nanoseconds may change again without a new time of change,
#: which file systems count in steps.
_SETTLED_NS = 1_000_000_000


class TokenFile:
    """Tokens, one per line; read again when the file changes.

    A file that is empty or can't be read may be about to be written: the last good tokens count for
    `KEEP_SECONDS` more, then none does. Each change between these states is logged once.

    Args:
        path: the file.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._tokens: list[bytes] = []
        #: What the file looked like when it was last read, if it had settled.
        self._seen: tuple[int, int, int] | None = None
        #: What is wrong with it, since when, and whether that has been for too long.
        self._problem = ""
        self._bad_since = 0.0
        self._expired = False

    def knows(self, token: bytes) -> bool:
        """Whether `token` is one of them. The time that it takes does not show which is similar."""
        found = [hmac.compare_digest(token, known) for known in self._current()]
        return any(found)

    def _current(self) -> list[bytes]:
        try:
            problem = self._read()
        except OSError as error:
            problem, self._seen = f"can't be read: {error.strerror}", None
        if problem != self._problem:
            self._note(problem)
        if not problem:
            return self._tokens
        if not self._expired and self._now() - self._bad_since >= KEEP_SECONDS:
            self._expired, self._tokens = True, []
            log.error("nobody is let in: there is no token", extra={"file": str(self._path)})
        return self._tokens

    def _read(self) -> str:
        """Read the file if it has changed; what is wrong with it. Raises OSError."""
        status = self._path.stat()
        seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        if seen == self._seen:
            return self._problem
        lines = self._path.read_bytes().split(b"\n")
        tokens = [line.strip() for line in lines if line.strip()]
        settled = time.time_ns() - status.st_mtime_ns > _SETTLED_NS
        self._seen = seen if settled else None
        if not tokens:
            return "is empty"
        self._tokens = tokens
        return ""

    def _note(self, problem: str) -> None:
        extra = {"file": str(self._path)}
        if not problem:
            self._expired = False
            log.warning("the token file is good again", extra=extra)
        else:
            if not self._problem:
                self._bad_since = self._now()
            kept = f"the last tokens count for {KEEP_SECONDS:g} s" if self._tokens else "no token"
            log.warning(f"the token file {problem}; {kept}", extra=extra)
        self._problem = problem
