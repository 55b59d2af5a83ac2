"""Messages between the command and its worker processes, which pickle them.

A worker receives one `Plan`, and a `Begin` for each level that it takes part in. It answers that
with a `Progress` once its first requests are made, and receives the moment to start, of the
system's monotonic clock, which all processes read. Any number of `Progress` and one `Outcome`
follow. It ends when its pipe does.
"""

from __future__ import annotations

import msgspec

from tokenpod.cli.bench.arrivals import Load
from tokenpod.cli.bench.figures import Record
from tokenpod.cli.bench.flags import BenchOptions
from tokenpod.cli.bench.prompts import Prompts
from tokenpod.cli.remote import Remote


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


class Plan(msgspec.Struct, frozen=True):
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


class Begin(msgspec.Struct, frozen=True):
    """The next level. The worker sends the requests `first`, `first + step`, ... of it.

    Args:
        slots: requests it may have in flight; None: any number.
    """

    level: Level
    first: int = 0
    step: int = 1
    slots: int | None = None


class Progress(msgspec.Struct, frozen=True):
    """How many requests of the level have ended so far, and how many of those failed."""

    ended: int = 0
    failed: int = 0


class Outcome(msgspec.Struct, frozen=True):
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
