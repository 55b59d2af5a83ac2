"""When requests are sent: three kinds of load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np


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


def arrival_times(
    load: Load, random: np.random.Generator, written: Sequence[float] = ()
) -> Iterator[float]:
    """Seconds from the start at which each request is due; without end, never decreasing.

    Args:
        load: closed: every request is due when a client is free, which counts as 0.
        random: where the gaps are drawn from.
        written: for replay: the file's times, in units of 1 / rate. After the last one they begin
            again, one unit later.
    """
    rate, shape = load.request_rate, load.burstiness
    if rate is None:
        yield from itertools.repeat(0.0)
    elif shape is None:
        period = written[-1] + 1.0
        for turn in itertools.count():
            for time in written:
                yield (turn * period + time) / rate
    else:
        now = 0.0
        while True:
            now += float(random.gamma(shape, 1.0 / (rate * shape)))
            yield now
