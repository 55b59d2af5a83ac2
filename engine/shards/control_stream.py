"""A rank's control stream to its pod's front end, next to its link.

The link belongs to the step loop, which may be stuck in a collective or in a send. Whatever must
get through then has a socket of its own: heartbeats, what a group waits for, why a rank ends, and
requests to drain.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tokenpod.core.group_messages import Drain, FromRank, Over, ToRank
from tokenpod.core.link import Link, LinkClosed


class ControlStream:
    """The rank's end. Any thread may send.

    Args:
        endpoint: the inherited socket.
        on_drain: called, on a thread of its own, with a request or an answer to carry.
        on_over: called on that thread with the reason why the front end gives the group up.
        on_closed: the front end has hung up or is gone.
    """

    def __init__(
        self,
        endpoint: socket.socket,
        *,
        on_drain: Callable[[Drain], None],
        on_over: Callable[[str], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._link = Link[ToRank](endpoint, ToRank)  # type: ignore[arg-type]
        self._lock = threading.Lock()
        self._on_drain = on_drain
        self._on_over = on_over
        self._on_closed = on_closed

    def listen(self) -> None:
        """Start the thread that receives."""
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def send(self, message: FromRank) -> None:
        """Send one message; if the front end is gone, only `on_closed` reports it."""
        with self._lock, contextlib.suppress(LinkClosed):
            self._link.send(message)

    def _listen(self) -> None:
        try:
            while True:
                for message in self._link.receive(None):
                    match message:
                        case Drain():
                            self._on_drain(message)
                        case Over():
                            self._on_over(message.message)
        except LinkClosed:
            self._on_closed()
