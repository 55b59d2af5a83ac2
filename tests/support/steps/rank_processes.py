"""Ranks as processes of their own, each forked when all that takes long is imported.

They are not forked by the process that runs tests, whose threads would be missing in them, but by
one that has done nothing but import.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Said = TypeVar("Said")

#: Ranks may have kernels to interpret, on processors that others use.
_SECONDS = 1100
#: Not what is in tests/: Python 3.11's server does not know where that lies.
_IMPORTED_ONCE = ["tokenpod.engine.run", "tokenpod.kernels.backends.cpu"]


def run_ranks(rank: Callable[[Job], Said], jobs: Sequence[Job]) -> list[Said]:
    """What `rank`, a function of a module, returns for each job, in a process for each.

    Raises what a rank raises.
    """
    sys.audit("prefork.start", rank.__name__)
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(_IMPORTED_ONCE)
    with ProcessPoolExecutor(len(jobs), mp_context=forking) as processes:
        return list(processes.map(rank, jobs, timeout=_SECONDS))
