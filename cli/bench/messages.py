"""Messages between the command and its worker processes, which pickle them.

A worker receives one `Plan`, and a `Begin` for each level that it takes part in. It answers that
with a `Progress` once its first requests are made, and receives the moment to start, of the
system's monotonic clock, which all processes read. Any number of `Progress` and one `Outcome`
follow. It ends when its pipe does.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenpod_client.cli.bench.figures import Record
from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.bench.prompts import Prompts
from tokenpod_client.cli.connection import Remote


class Load(msgspec.Struct, frozen=True):
    """The load of one level, as the report has it too.

    Args:
        mode: closed: so many clients, each of which sends its next request when its last one has
            ended; open: requests arrive at random times, however slow the server is; replay: they
            arrive when a workload file says, `request_rate` times as fast as it is written.
        concurrency: requests in flight at most; one more waits, and its wait is measured. None: any
            number.
        request_rate: requests/s; None in a closed loop and for all at once.
        burstiness: of an open loop: shape of the gamma distribution of the gaps. 1: a Poisson
            process; less comes in bursts, more comes evenly.
    """

    mode: Literal["closed", "open", "replay"]
    concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float | None = None

    @property
    def all_at_once(self) -> bool:
        """Whether every request is due at the start."""
        return self.mode == "open" and self.request_rate is None

    @property
    def name(self) -> str:
        """How a table names it."""
        if self.mode == "closed":
            return f"{self.concurrency} at a time"
        return "all at once" if self.all_at_once else f"{self.request_rate:g} requests/s"


class Level(msgspec.Struct, frozen=True):
    """One run under one load; `number` 0 is the warm-up.

    It sends so many `requests`, if that is not None, within `duration` seconds, if that is not
    None; those in flight then are waited for.
    """

    number: int
    load: Load
    requests: int | None
    duration: float | None = None


class Plan(msgspec.Struct, frozen=True):
    """All that is to be done.

    The `remotes` take turns; `options` are as typed; `bounds` are for goodput, in seconds by
    latency, and may be empty.
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

    It may have `slots` of them in flight; None: any number.
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
    """A worker's part of a level, from the start until its last request had ended.

    `cpu_seconds` is of all its threads, `lags` are how late its event loop was, in seconds.
    """

    records: list[Record]
    cpu_seconds: float
    wall_seconds: float
    lags: list[float]

    @property
    def busy(self) -> float:
        """CPU time over time. Above 1: its threads ran at once."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0
