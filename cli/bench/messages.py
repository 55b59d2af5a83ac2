"""Messages between the command and its worker processes.

A worker reads one `Plan`, and a `Begin` for each level that it takes part in. It answers a `Begin`
with a `Progress` once its first requests are made, and the `Go` after it with any number of
`Progress` and one `Outcome`. It ends when its standard input does. On the wire a message is its
length, 4 bytes big-endian, and a struct in msgpack.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import numpy as np

from tokenpod.cli.bench.arrivals import Load
from tokenpod.cli.bench.flags import BenchOptions
from tokenpod.cli.bench.prompts import Prompts
from tokenpod.cli.remote import Remote

#: Bytes before a message that are its length.
LENGTH_BYTES = 4

#: A message with tokens as `Record.stream` keeps it: when it came in seconds, how many tokens it
#: had, of which sample.
ARRIVAL = struct.Struct("=dII")
_ARRIVALS = np.dtype([("time", np.float64), ("tokens", np.uint32), ("sample", np.uint32)])


class Level(msgspec.Struct, frozen=True):
    """One run under one load.

    Args:
        number: 0 is the warm-up.
        requests: how many to send, or None.
        duration: seconds in which to send them, or None; those in flight are waited for.
    """

    number: int
    load: Load
    requests: int | None
    duration: float | None = None


class Plan(msgspec.Struct, frozen=True, tag=True):
    """All that is to be done.

    Args:
        remotes: the servers, which take turns.
        options: as typed.
        levels: in order.
        bounds: for goodput, in seconds by latency; may be empty.
    """

    remotes: list[Remote]
    options: BenchOptions
    prompts: Prompts
    seed: int
    ignore_eos: bool
    levels: list[Level]
    bounds: dict[str, float]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The next level. The worker sends the requests `first`, `first + step`, ... of it.

    Args:
        slots: requests it may have in flight; None: any number.
    """

    level: Level
    first: int = 0
    step: int = 1
    slots: int | None = None


class Go(msgspec.Struct, frozen=True, tag=True):
    """Begin at this moment of the system's monotonic clock, which all processes read."""

    at: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How many requests of the level have ended so far, and how many of those failed."""

    ended: int = 0
    failed: int = 0


class Record(msgspec.Struct, array_like=True):
    """One request and what became of it. Times are seconds from the level's start.

    Args:
        target: which server.
        due: when it was to be sent; earlier than `sent` where the client could not keep up.
        ended: when its status came.
        code: the status code's name; UNFINISHED where an OK stream lacked a `finished`.
        detail: the status' message; "" for OK.
        prompt_tokens, cached_tokens: as the server counted them; 0 before it did.
        queue_s, first_token_s: as the server measured them, of sample 0; NaN if it did not.
        stream: the messages with tokens, each as `ARRIVAL`.
    """

    index: int
    target: int
    due: float
    sent: float
    ended: float = math.nan
    code: str = "OK"
    detail: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = math.nan
    first_token_s: float = math.nan
    stream: bytearray = msgspec.field(default_factory=bytearray)

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.code == "OK"

    @property
    def arrivals(self) -> np.ndarray:
        """The messages with tokens: columns `time`, `tokens` and `sample`."""
        return np.frombuffer(self.stream, _ARRIVALS)


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """A worker's part of a level.

    Args:
        cpu_seconds: CPU time of the process, all threads together.
        wall_seconds: from the start until its last request had ended.
        lags: how late its event loop was, in seconds, every so often.
    """

    records: list[Record]
    cpu_seconds: float
    wall_seconds: float
    lags: list[float]

    @property
    def busy(self) -> float:
        """CPU time over time. Above 1: its threads ran at once."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0


Message = Plan | Begin | Go | Progress | Outcome


def encode(message: Message) -> bytes:
    """A message with its length."""
    body = msgspec.msgpack.encode(message, enc_hook=str)
    return len(body).to_bytes(LENGTH_BYTES) + body


def decode(body: bytes) -> Message:
    """The message in what follows the length."""
    # Paths alone have no form of their own in msgpack.
    hook: Any = lambda kind, text: kind(text)  # noqa: E731
    message: Message = msgspec.msgpack.decode(body, type=Message, dec_hook=hook)
    return message
