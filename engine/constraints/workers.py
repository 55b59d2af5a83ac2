"""Threads beside the step loop: some make masks, some compile.

    fast    masks, most often in microseconds
    slow    those of matchers whose last mask took long: nobody else waits behind them
    compile constraints with their first masks, of low priority for the kernel

The library lets go of the interpreter's lock while it works, so that threads are enough (measured
by benchmarks/constraints.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

#: What a thread that wants the interpreter's lock waits before the one that has it must let go. A
#: worker gets it back after each mask, and by default would wait 5 ms while the loop plans.
_SWITCH_SECONDS = 0.0005
_MOST_WORKERS = 8
_SLOW_WORKERS, _COMPILERS = 2, 2
#: Of a compiling thread: a step's own threads come first.
_NICE = 10


class Workers:
    """The threads; they end with the process.

    Args:
        count: of those for fast masks; 0: half of the cores, at most eight.
    """

    def __init__(self, count: int = 0) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        cores = len(os.sched_getaffinity(0))
        self._queues = {
            "fast": (count or max(1, min(cores // 2, _MOST_WORKERS)), 0),
            "slow": (_SLOW_WORKERS, _NICE // 2),
            "compile": (_COMPILERS, _NICE),
        }
        self._jobs: dict[str, SimpleQueue[Callable[[], None]]] = {}
        for kind, (threads, nice) in self._queues.items():
            jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
            self._jobs[kind] = jobs
            for at in range(threads):
                name = f"constraints-{kind}-{at}"
                threading.Thread(target=_work, args=(jobs, nice), name=name, daemon=True).start()

    def run(self, job: Callable[[], None], kind: str) -> None:
        """Do a job, which raises nothing, in a thread of this kind."""
        self._jobs[kind].put(job)


def _work(jobs: SimpleQueue[Callable[[], None]], nice: int) -> None:
    if nice:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    while True:
        jobs.get()()
