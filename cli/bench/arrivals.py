"""When requests are sent: three kinds of load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """So many clients, each of which sends its next request when its last one has ended."""

    concurrency: int


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Requests come at random times, however slow the server is.

    Args:
        rate: requests a second; None: all at once.
        burstiness: shape of the gamma distribution of the gaps. 1: a Poisson process; less comes in
            bursts, more comes evenly.
        most: requests in flight at most; one more waits its turn, and its wait is measured.
    """

    rate: float | None
    burstiness: float = 1.0
    most: int | None = None


class Replay(msgspec.Struct, frozen=True, tag="replay"):
    """Requests come when a workload file says, `rate` times as fast as it is written."""

    rate: float
    most: int | None = None


Load = Closed | Open | Replay


def label(load: Load) -> str:
    """How a table names a load."""
    match load:
        case Closed(concurrency):
            return f"{concurrency} at a time"
        case Open(None):
            return "all at once"
        case Open(rate) | Replay(rate):
            return f"{rate:g} requests/s"


def arrival_times(
    load: Open | Replay, random: np.random.Generator, written: Sequence[float] = ()
) -> Iterator[float]:
    """Seconds from the start at which each request is due; without end, never decreasing.

    Args:
        random: where the gaps are drawn from.
        written: for Replay: the file's times, in units of 1 / rate. After the last one they begin
            again, one unit later.
    """
    if isinstance(load, Replay):
        period = written[-1] + 1.0
        for turn in itertools.count():
            for time in written:
                yield (turn * period + time) / load.rate
    elif load.rate is None:
        yield from itertools.repeat(0.0)
    else:
        now = 0.0
        scale = 1.0 / (load.rate * load.burstiness)
        while True:
            now += float(random.gamma(load.burstiness, scale))
            yield now


class Share(msgspec.Struct, frozen=True):
    """Which requests of a level one process sends: `first`, `first + step`, ...

    Args:
        slots: requests it may have in flight; None: any number.
    """

    first: int
    step: int
    slots: int | None


def share(load: Load, process: int, processes: int) -> Share | None:
    """The share of one process out of several; None where there is nothing for it to do."""
    slots = load.concurrency if isinstance(load, Closed) else load.most
    if slots is None:
        return Share(process, processes, None)
    # A process without a slot could never send its requests: fewer processes take part.
    active = min(processes, slots)
    if process >= active:
        return None
    return Share(process, active, slots // active + (process < slots % active))
