"""The wire between service and engine: msgpack messages over a private pair of unix sockets.

The pair has no name in any file system, so there is nothing to clean up and nobody else to connect;
each side sees the other's death as the end of its stream.

    frame = length of the body (4 bytes, little endian) + body (msgpack)
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
#: Bytes that a `PatientLink` keeps for the other side.
_UNSENT_BYTES = 16 << 20

T = TypeVar("T")


class LinkClosed(Exception):
    """The other side is gone."""


def encode_frame(encoder: msgspec.msgpack.Encoder, message: msgspec.Struct) -> bytearray:
    """A frame that holds `message`."""
    frame = bytearray(_LENGTH.size)
    encoder.encode_into(message, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return frame


def give_link(joins: socket.socket, index: int, endpoint: socket.socket) -> None:
    """Send `endpoint`, front end `index`'s new link, to another process; raises OSError.

    Args:
        joins: of type SOCK_SEQPACKET.
    """
    socket.send_fds(joins, [bytes([index])], [endpoint.fileno()])


def take_link(joins: socket.socket) -> tuple[int, socket.socket] | None:
    """What `give_link` sent at the other end of `joins`; None: that end is closed."""
    index, descriptors, _, _ = socket.recv_fds(joins, 1, 1)
    if not descriptors:
        return None
    return index[0], socket.socket(fileno=descriptors[0])


class FrameDecoder(Generic[T]):
    """Cuts a byte stream into messages of the union `kind`."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[T]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        messages: list[T] = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            end = at + _LENGTH.size + length
            if end > len(self._buffer):
                break
            with memoryview(self._buffer) as view:
                messages.append(self._decoder.decode(view[at + _LENGTH.size : end]))
            at = end
        del self._buffer[:at]
        return messages


class Link(Generic[T]):
    """The engine's end: blocking sends, and receives that wait only when there is no work."""

    def __init__(self, endpoint: socket.socket, kind: type[T]) -> None:
        endpoint.setblocking(True)
        self._socket = endpoint
        self._encoder = msgspec.msgpack.Encoder()
        self._frames = FrameDecoder[T](kind)

    @property
    def unsent(self) -> bool:
        """Whether something waits to be sent: it goes when the socket takes it, by `flush`."""
        return False

    def flush(self) -> None:
        """Send what waits, as far as it goes at once; raises LinkClosed."""

    def fileno(self) -> int:
        """The socket's number, to wait on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; raises LinkClosed."""
        try:
            self._socket.sendall(encode_frame(self._encoder, message))
        except OSError as error:
            raise LinkClosed from error

    def receive(self, wait: float | None = 0.0) -> list[T]:
        """Messages that have arrived; waits up to `wait` seconds (None: for ever) for the first.

        Raises LinkClosed when the other side is gone.
        """
        messages: list[T] = []
        while select.select([self._socket], [], [], wait)[0]:
            try:
                data = self._socket.recv(_CHUNK)
            except OSError as error:
                raise LinkClosed from error
            if not data:
                raise LinkClosed
            messages += self._frames.feed(data)
            if messages:
                # Whatever else is there already; a part of a frame alone is worth waiting for.
                wait = 0.0
        return messages


class PatientLink(Link[T]):
    """A link whose sends do not wait for a reader that lags, up to a number of bytes.

    Args:
        patience: seconds without any progress after which the other side counts as gone.
    """

    def __init__(self, endpoint: socket.socket, kind: type[T], *, patience: float) -> None:
        super().__init__(endpoint, kind)
        seconds, rest = divmod(patience, 1)
        # For sends that wait, once too much is kept.
        interval = struct.pack("ll", int(seconds), int(rest * 1e6))
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        self._patience = patience
        self._unsent = bytearray()
        self._moved_at = 0.0

    @property
    def unsent(self) -> bool:
        """Whether something waits to be sent: it goes when the socket takes it, by `flush`."""
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        """Send one message, or keep what the socket does not take; raises LinkClosed."""
        if not self._unsent:
            self._moved_at = time.monotonic()
        self._unsent += encode_frame(self._encoder, message)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it goes at once; waits only beyond the bytes that are kept.

        Raises LinkClosed if the other side is gone, or has not read for too long.
        """
        if not self._unsent:
            return
        try:
            if len(self._unsent) > _UNSENT_BYTES:
                self._socket.sendall(self._unsent)
                sent = len(self._unsent)
            else:
                sent = self._send_now()
        except OSError as error:
            raise LinkClosed from error
        if sent:
            self._moved_at = time.monotonic()
            del self._unsent[:sent]
        elif time.monotonic() - self._moved_at > self._patience:
            raise LinkClosed

    def _send_now(self) -> int:
        try:
            return self._socket.send(self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
