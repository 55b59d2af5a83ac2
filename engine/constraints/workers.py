"""Threads beside the step loop: some make masks, some compile.

    fast    masks that are made one by one, most often in microseconds
    slow    those of matchers whose last mask took long: nobody else waits behind them
    compile constraints with their first masks, one at a time on small machines
    dear    those that take long to compile: nobody else waits behind them

Texts whose masks have been quick need none of them (`together`). The library lets go of the
interpreter's lock while it works (measured by benchmarks/constraints.py at 487f27e9). No thread
has a lower priority: one that is preempted while it has that lock would hold up the step loop
(measured: streams stood still for a second).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

#: What a thread that wants the interpreter's lock waits before the one that has it must let go. A
#: worker gets it back after each mask, and by default would wait 5 ms while the loop plans.
_SWITCH_SECONDS = 0.0005
_MOST_WORKERS, _MOST_TOGETHER = 8, 16
#: The library goes down as deep as grammars do: what has passed a trial must have room.
_STACK_BYTES = 8 << 20
_SLOW_WORKERS, _MOST_COMPILERS = 2, 2


class Workers:
    """The threads; they end with the process.

    Args:
        count: of those for fast masks, one by one or together; 0: half of the cores, at most 8, or
            all but one, at most 16.
    """

    def __init__(self, count: int = 0) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        cores = len(os.sched_getaffinity(0))
        #: How many the library may have for masks that are made together.
        self.together = count or max(1, min(cores - 1, _MOST_TOGETHER))
        #: How many compile.
        self.compilers = max(1, min(cores // 4, _MOST_COMPILERS))
        kinds = {
            "fast": count or max(1, min(cores // 2, _MOST_WORKERS)),
            "slow": _SLOW_WORKERS,
            "compile": self.compilers,
            "dear": 1,
        }
        before = threading.stack_size(_STACK_BYTES)
        self._jobs: dict[str, SimpleQueue[Callable[[], None]]] = {}
        for kind, threads in kinds.items():
            jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
            self._jobs[kind] = jobs
            for at in range(threads):
                name = f"constraints-{kind}-{at}"
                threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()
        threading.stack_size(before)

    def run(self, job: Callable[[], None], kind: str) -> None:
        """Do a job, which raises nothing, in a thread of this kind."""
        self._jobs[kind].put(job)


def _work(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
