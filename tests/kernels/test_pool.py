"""The pool's memory on a CPU: given when it is first written, or all at once."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tokenpod.kernels.pool import KVPool, alike


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_memory_comes_when_it_is_written_unless_all_is_taken():
    before = resident_bytes()
    pool = KVPool(
        layers=2,
        slots=32_000,
        layout=alike(2, 64),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    size = 32_000 * KVPool.bytes_per_slot(layers=2, layout=alike(2, 64), dtype=torch.float32)
    assert resident_bytes() - before < size / 4
    pool.take_pages()
    assert resident_bytes() - before > size * 0.9
