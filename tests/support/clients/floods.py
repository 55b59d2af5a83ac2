"""Floods: raw HTTP/2 connections that misbehave, frames written by hand; and calls all at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import grpc

from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
CANCEL = struct.pack(">I", 8)
MODEL = "/tokenpod.v1.GenerationService/GetModel"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """A header, spelled out: no table, no compression."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call_headers(path: str = MODEL) -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(header(name, value) for name, value in fields.items())


def opened(port: int) -> socket.socket:
    """A connection on which both sides' settings hold: gRPC refuses most calls until then."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
    return connection


def closed_within(connection: socket.socket, seconds: float) -> bool:
    """Whether the server closes; what it says until then is dropped."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            if not connection.recv(1 << 16):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


# -- floods: endless, each item a few kilobytes of frames ----------------------------------------


def resets() -> Iterator[bytes]:
    """Calls that are opened and reset at once."""
    block, stream = call_headers(), 1
    while True:
        out = []
        for _ in range(50):
            out.append(frame(HEADERS, END_HEADERS, stream, block))
            out.append(frame(RST_STREAM, 0, stream, CANCEL))
            stream += 2
        yield b"".join(out)


def given_up(path: str) -> Iterator[bytes]:
    """150 calls, then their resets and the next 150: each is there for a while."""
    block, first, resets = call_headers(path), 1, b""
    while True:
        streams = range(first, first + 300, 2)
        yield resets + b"".join(frame(HEADERS, END_HEADERS, each, block) for each in streams)
        resets = b"".join(frame(RST_STREAM, 0, each, CANCEL) for each in streams)
        first += 300


def pings() -> Iterator[bytes]:
    while True:
        yield frame(PING, 0, 0, b"12345678") * 100


def settings() -> Iterator[bytes]:
    while True:
        yield frame(SETTINGS, 0, 0) * 200


def continuations(payload: bytes) -> Iterator[bytes]:
    """One call whose headers never end."""
    yield frame(HEADERS, 0, 1, call_headers())
    while True:
        yield frame(CONTINUATION, 0, 1, payload) * 50


def silent_calls(calls: int) -> Iterator[bytes]:
    """Calls that send headers and no message; they last for as long as the server lets them."""
    block = call_headers("/tokenpod.v1.GenerationService/Generate")
    yield b"".join(frame(HEADERS, END_HEADERS, 2 * at + 1, block) for at in range(calls))


RESETS = "HEADERS + RST_STREAM"
#: Floods that gRPC does not end by itself.
ONGOING: dict[str, Callable[[], Iterator[bytes]]] = {
    RESETS: resets,
    "SETTINGS": settings,
    "CONTINUATION of 110 bytes": lambda: continuations(header("x", "y" * 107)),
}
#: Floods that it ends.
CLOSED: dict[str, Callable[[], Iterator[bytes]]] = {
    "PING": pings,
    "empty CONTINUATION": lambda: continuations(b""),
}


def flood(port: int, frames: Iterator[bytes], over: threading.Event) -> int:
    """Send until told or cut off; bytes sent. What the server says is read and dropped."""
    sent = 0
    with opened(port) as connection:
        connection.settimeout(1.0)
        drain = threading.Thread(target=_drain, args=(connection, over), daemon=True)
        drain.start()
        for piece in frames:
            if over.is_set():
                break
            try:
                connection.sendall(piece)
            except TimeoutError:
                continue
            except OSError:
                break
            sent += len(piece)
    return sent


def _drain(connection: socket.socket, over: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not over.is_set():
            try:
                if not connection.recv(1 << 16):
                    return
            except TimeoutError:
                continue


# -- bursts --------------------------------------------------------------------------------------


async def burst(address: str, connections: int, calls: int) -> Counter[tuple[str, bool]]:
    """Make calls at once on each connection: (code, whether there was a hint) and how often."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    ends: Counter[tuple[str, bool]] = Counter()
    request = pb.GenerateRequest(text="x", stopping={"max_new_tokens": 1})

    async def one(channel: grpc.aio.Channel) -> None:
        try:
            async for _ in GenerationServiceStub(channel).Generate(request, timeout=300):
                pass
            ends["OK", False] += 1
        except grpc.aio.AioRpcError as error:
            hint = "grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ())
            ends[error.code().name, hint] += 1

    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(connections)
        ]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        await asyncio.gather(*(one(channel) for channel in channels for _ in range(calls)))
    return ends
