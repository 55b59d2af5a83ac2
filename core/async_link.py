"""The service's end of a link to a child process, on an event loop.

Apart from link.py, so that child processes start without asyncio.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from typing import Generic, Self, TypeVar, cast

import msgspec

from tokenpod.core.link import FrameDecoder, encode_frame

T = TypeVar("T")


class AsyncLink(asyncio.Protocol, ABC, Generic[T]):
    """Sends and receives messages over a socket; subclasses say what a message means.

    Args:
        kind: the union of the messages that come.
    """

    def __init__(self, kind: type[T]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._frames = FrameDecoder[T](kind)
        self._transport: asyncio.Transport | None = None

    async def open(self, endpoint: socket.socket) -> Self:
        """Take over `endpoint`."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=endpoint)
        return self

    @abstractmethod
    def receive(self, message: T) -> None:
        """Take one message."""

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; nothing once either side has hung up."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(self._encoder, message))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        # uvloop's transports are asyncio's by behaviour, not by descent.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        for message in self._frames.feed(data):
            self.receive(message)
