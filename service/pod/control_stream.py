"""The front end's end of a control stream; see engine/shards/control_stream.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tokenpod.core.async_link import AsyncLink
from tokenpod.core.messages import Broken, Drain, FromRank, Joined, Pulse, Waiting


class ControlStream(AsyncLink[FromRank]):
    """Receives the messages of one rank, and sends it `ToRank`: for itself, or for another pod.

    Args:
        on_waiting: called with what the start-up of the group waits for.
        on_drain: called with another pod's request to drain, or its answer.
    """

    def __init__(
        self, on_waiting: Callable[[str], None], on_drain: Callable[[Drain], None]
    ) -> None:
        super().__init__(FromRank)  # type: ignore[arg-type]
        #: Why the rank ends, once it has said so.
        self.broken: asyncio.Future[Broken] = asyncio.get_running_loop().create_future()
        #: Where clients reach the leader's pod; of followers alone.
        self.leader_address = ""
        #: Heartbeats so far.
        self.pulses = 0
        self._on_waiting = on_waiting
        self._on_drain = on_drain

    def receive(self, message: FromRank) -> None:
        """Take one message of the rank."""
        match message:
            case Pulse():
                self.pulses += 1
            case Waiting():
                self._on_waiting(message.message)
            case Joined():
                self.leader_address = message.leader_address
            case Drain():
                self._on_drain(message)
            case Broken():
                if not self.broken.done():
                    self.broken.set_result(message)
