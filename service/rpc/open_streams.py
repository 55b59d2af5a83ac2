"""Limits calls that stay open for as long as their clients like."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from tokenpod.service.calls.errors import RETRY_SECONDS, ResourceExhausted

#: One connection may have this part of a server's streams.
_PART_OF_ONE = 8


class OpenStreams:
    """Streams of one kind that are open on one server.

    Args:
        name: of the kind, as errors have it.
        most: at once; each takes 20 to 30 kB. One connection may have an eighth of them. Those of
            unix sockets can't be told apart, and have none of their own.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._most_of_one = max(most // _PART_OF_ONE, 1)
        #: Streams by connection.
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, connection: str) -> Iterator[None]:
        """For a stream of this connection. Raises ResourceExhausted if there is none."""
        own, all_ = self._open[connection], self._open.total()
        apart = not connection.startswith("unix")
        if all_ >= self._most or (apart and own >= self._most_of_one):
            raise ResourceExhausted(
                f"{all_} {self._name} streams are open, {own} of them of this connection; this"
                f" server takes at most {self._most}, {self._most_of_one} of a connection",
                limit=f"{self._name.lower()} streams",
                retry_after=RETRY_SECONDS,
            )
        self._open[connection] += 1
        try:
            yield
        finally:
            self._open[connection] -= 1
            if not self._open[connection]:
                del self._open[connection]
