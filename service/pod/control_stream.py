"""The front end's end of a rank's control stream (see engine/shards/control_stream.py).

A follower's pod that is to stop asks the leader's to drain first, since the group ends with it. The
request and its answer pass through the ranks, whose streams are mutually authenticated and end when
the group does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tokenpod.core.async_link import AsyncLink
from tokenpod.core.group_messages import Drain, FromRank, Joined, Pulse, Waiting
from tokenpod.core.messages import Broken
from tokenpod.service.calls.errors import RETRY_SECONDS, Unavailable


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


class DrainRequests:
    """Requests to drain, on either side, of one life of the engines.

    `open` it with the control stream of the first rank.

    Args:
        leads: this pod answers; else it asks.
    """

    def __init__(self, *, leads: bool) -> None:
        #: Drains the leader's pod, once it serves.
        self.drain: Callable[[], Awaitable[None]] | None = None
        self._leads = leads
        self._control: ControlStream | None = None
        self._drained: asyncio.Future[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()

    def open(self, control: ControlStream | None) -> None:
        """Write through this rank."""
        self._control = control

    def close(self) -> None:
        """The ranks are gone: nothing will be answered any more."""
        self._control = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(
                Unavailable("the group has ended", retry_after=RETRY_SECONDS)
            )
        for task in self._answers:
            task.cancel()

    async def ask(self) -> None:
        """Return once the leader's pod has drained. Raises Unavailable if the group ends before."""
        if self._control is None:
            raise Unavailable("the group has not formed yet", retry_after=RETRY_SECONDS)
        self._drained = asyncio.get_running_loop().create_future()
        self._control.send(Drain(0))
        await self._drained

    def deliver(self, drain: Drain) -> None:
        """A request has come, or its answer."""
        if self._leads:
            task = asyncio.create_task(self._answer(drain))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
        elif self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def _answer(self, drain: Drain) -> None:
        if self.drain is not None:
            # A leader that does not serve yet has nothing to drain.
            await self.drain()
        if self._control is not None:
            self._control.send(Drain(drain.rank))
