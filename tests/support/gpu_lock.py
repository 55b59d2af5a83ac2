"""Who may use the GPU, over all test processes of this machine: one test that fills it, or others.

    gate  --- taken by each test for a moment, and by one that fills the GPU until it has the room
    room  --- shared by tests, exclusive for one that fills the GPU

Without the gate, tests that share the room would keep one that needs it for itself out for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path(tempfile.gettempdir())


@contextlib.contextmanager
def gpu_lock(*, fills: bool) -> Iterator[None]:
    """Wait for the GPU, and hold it. `fills`: alone; afterwards its memory is free again."""
    with _file("gate") as gate, _file("room") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if fills else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
        if fills:
            _give_memory_back()


@contextlib.contextmanager
def _file(name: str) -> Iterator[int]:
    descriptor = os.open(_FOLDER / f"tokenpod-tests-gpu-{name}", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _give_memory_back() -> None:
    gc.collect()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
