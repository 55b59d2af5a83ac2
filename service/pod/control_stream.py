"""The front end's end of a rank's line (engine/shards/line.py)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from tokenpod.core.link import FrameDecoder, encode_frame
from tokenpod.core.messages import Broken, Drain, FromRank, Joined, Pulse, ToRank, Waiting


class ControlStream(asyncio.Protocol):
    """Hears one rank. Make it with `connect`.

    Args:
        on_waiting: what keeps the group from forming.
        on_drain: called with another pod's request to drain, or its answer.
    """

    def __init__(
        self, on_waiting: Callable[[str], None], on_drain: Callable[[Drain], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        #: Why the rank ends, once it has said so.
        self.broken: asyncio.Future[Broken] = loop.create_future()
        #: Where clients reach the leader's pod; of followers alone.
        self.leader_address = ""
        #: Heartbeats so far.
        self.pulses = 0
        self._on_waiting = on_waiting
        self._on_drain = on_drain
        self._encoder = msgspec.msgpack.Encoder()
        self._frames = FrameDecoder[FromRank](FromRank)  # type: ignore[arg-type]
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(
        cls,
        endpoint: socket.socket,
        on_waiting: Callable[[str], None],
        on_drain: Callable[[Drain], None],
    ) -> ControlStream:
        """Take over `endpoint`."""
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: cls(on_waiting, on_drain), sock=endpoint)
        return line

    def send(self, message: ToRank) -> None:
        """To the rank, or through it to another pod."""
        if self._transport is not None:
            self._transport.write(encode_frame(self._encoder, message))

    def close(self) -> None:
        """Hang up: the rank leaves its group."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        # uvloop's transports are asyncio's by behaviour, not by descent.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        for message in self._frames.feed(data):
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
