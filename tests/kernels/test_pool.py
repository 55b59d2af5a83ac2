"""The pool's memory on a CPU: given when it is first written, or all at once."""

from __future__ import annotations

import ctypes
import os

import torch

from support.kernels.layouts import alike
from tokenpod.kernels.cache.kv_pool import KVLayout, KVPool


def resident_share(tensors: list[torch.Tensor]) -> float:
    """How much of the tensors' whole pages is in memory, by the system's word on each page."""
    page, libc = os.sysconf("SC_PAGE_SIZE"), ctypes.CDLL(None, use_errno=True)
    there = asked = 0
    for tensor in tensors:
        first = -(-tensor.data_ptr() // page) * page
        pages = (tensor.data_ptr() + tensor.nbytes - first) // page
        found = (ctypes.c_ubyte * pages)()
        assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * page), found) == 0
        there += sum(each & 1 for each in found)
        asked += pages
    return there / asked


def test_memory_comes_when_it_is_written_unless_all_is_taken():
    # Less than 32 MiB the C library may have had before, and cleared.
    pool = KVPool(
        slots=70_000,
        layouts=[alike(2, 64)],
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert resident_share(pool.stored) < 0.25
    pool.take_pages()
    assert resident_share(pool.stored) == 1


def test_values_that_are_part_of_keys_are_stored_once():
    layout = KVLayout(1, 6, 4, shared=True)
    pool = KVPool(slots=5, layouts=[layout], dtype=torch.float32, device=torch.device("cpu"))
    pool.keys[0][:] = torch.arange(6.0)[:, None, None] * 10 + torch.arange(6)
    assert torch.equal(pool.values[0], pool.keys[0][..., :4])
    size = KVPool.bytes_per_slot(layouts=[layout] * 3, dtype=torch.bfloat16)
    assert size == 3 * 6 * 2


def test_a_pool_of_int8_has_scales_with_its_numbers():
    layout = KVLayout(2, 6, 4)
    pool = KVPool(slots=5, layouts=[layout], dtype=torch.int8, device=torch.device("cpu"))
    scales = pool.scales[0]
    assert [tuple(scale.shape) for scale in scales] == [(6, 2)] * 2
    scales.keys[:] = torch.arange(6.0)[:, None]
    pool.values[0][:] = torch.arange(6)[:, None, None]
    size = KVPool.bytes_per_slot(layouts=[layout] * 3, dtype=torch.int8)
    assert size == 3 * (2 * (6 + 4) + 2 * 2 * 4)
    pool.take_pages()
    assert not scales.keys.any()
