"""What the command and its worker processes tell each other, and how it is framed.

A frame is its length in 4 bytes, big-endian, and one struct in msgpack. A worker gets one `Plan`,
then a `Begin` a level, each of which it answers with `Ready`; a `Go` it answers with any number of
`Progress` and one `Outcome`. When its standard input ends, so does the worker.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from tokenpod.cli.bench.arrivals import Load
from tokenpod.cli.bench.prompts import Prompts

_LENGTH = struct.Struct(">I")


class Target(msgspec.Struct, frozen=True):
    """How to reach the servers; as `Remote`, with any number of addresses.

    Args:
        connections: HTTP/2 connections a process opens to each address.
    """

    addresses: list[str]
    token: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    connections: int = 1


class Sampling(msgspec.Struct, frozen=True):
    """What every request has in common. None and 0 leave a field unset."""

    ignore_eos: bool = True
    temperature: float | None = None
    top_p: float = 0.0
    n: int = 1


class Plan(msgspec.Struct, frozen=True, tag=True):
    """All that a worker needs.

    Args:
        process, processes: which of how many this worker is.
        deadline: seconds a request may take, or None.
    """

    process: int
    processes: int
    target: Target
    prompts: Prompts
    sampling: Sampling
    seed: int
    deadline: float | None


class Level(msgspec.Struct, frozen=True, tag=True):
    """One run under one load.

    Args:
        number: 0 is the warm-up.
        requests: how many to send, or None.
        duration: seconds in which to send them, or None; those in flight are waited for.
    """

    number: int
    load: Load
    requests: int | None
    duration: float | None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first requests of a level are made."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """Begin at this moment of the system's monotonic clock, which all processes share."""

    at: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How many requests of the level have ended so far, and how many of those failed."""

    ended: int
    failed: int


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What became of one request. Times are seconds from the level's start.

    Args:
        due: when it was to be sent; earlier than `sent` where the client could not keep up.
        ended: when its status came.
        code: the status code's name; UNFINISHED where an OK stream lacked a `finished`.
        detail: the status' message; "" for OK.
        prompt_tokens, cached_tokens: as the server counted them; 0 before it did.
        queue_s, first_token_s: as the server measured them, of sample 0; NaN if it did not.
        times, tokens, samples: when each message with tokens came (float64), how many it held
            (uint32), and of which sample (uint32).
    """

    index: int
    target: int
    due: float
    sent: float
    ended: float
    code: str
    detail: str
    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    first_token_s: float
    times: bytes
    tokens: bytes
    samples: bytes

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.code == "OK"


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """A worker's share of a level.

    Args:
        cpu_seconds: what the process computed, all threads together.
        wall_seconds: from the start until its last request had ended.
        lags: how late its event loop came, in seconds, every so often.
    """

    records: list[Record]
    cpu_seconds: float
    wall_seconds: float
    lags: list[float]


Request = Plan | Level | Go
Answer = Ready | Progress | Outcome


def frame(message: Request | Answer) -> bytes:
    """A message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Bytes that follow a frame's first `HEAD_BYTES`."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


#: Bytes of a frame before its body.
HEAD_BYTES = _LENGTH.size


def read_request(pipe: BinaryIO) -> Request | None:
    """The next message for a worker; None when the pipe has ended."""
    head = pipe.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    request: Request = msgspec.msgpack.decode(pipe.read(body_length(head)), type=Request)
    return request


def decode_answer(body: bytes) -> Answer:
    """A worker's message."""
    answer: Answer = msgspec.msgpack.decode(body, type=Answer)
    return answer
