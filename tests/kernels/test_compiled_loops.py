"""Compiled loops run every item once, on as many threads as torch has."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numba
import pytest
import torch
from numba.core.caching import IndexDataCacheFile
from numba.core.ccallback import CFunc

from tokenpod.kernels.backends import cpu, reference
from tokenpod.kernels.compiled import loops
from tokenpod.kernels.compiled.kinds import narrow, tensor
from tokenpod.kernels.compiled.loops import END, FIRST, arguments, floats, loop, take


@loop
def _count(address):
    a = arguments(address)
    visits = floats(a[FIRST], (a[END],))
    item = take(a)
    while item < a[END]:
        visits[item] += 1
        item = take(a)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("items", [0, 1, 3, 100_000])
def test_every_item_is_visited_once(items, threads):
    visits = torch.zeros(items)
    for _ in range(3):
        _count(items, visits.data_ptr())
    assert torch.equal(visits, torch.full((items,), 3.0))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_threads_share_attention_by_rows_or_by_heads(rows, threads, row, step_over, draw):
    batch = step_over([row(1, (length % 13 + 1, 5)) for length in range(rows)], 1200)
    q, keys, values = draw(rows, 6, 16), draw(1200, 3, 16), draw(1200, 3, 16)
    ops = cpu.OPERATIONS
    got = ops.attention(q, keys, values, ops.plan_attention(batch, None))
    expected = reference.attention(q, keys, values, reference.plan_attention(batch, None))
    torch.testing.assert_close(got, expected, rtol=0, atol=4e-6)


def test_bits_do_not_depend_on_the_batch(row, step_over, draw):
    """A row alone gets the same numbers as among others."""
    batch = step_over([row(1, (70, 33)), row(1, (200,))], 400)
    q, keys, values = draw(2, 4, 16), draw(400, 2, 16), draw(400, 2, 16)
    ops = cpu.OPERATIONS
    together = ops.attention(q, keys, values, ops.plan_attention(batch, None))
    alone = step_over([row(1, (70, 33))], 400)
    alone.b_runs[0][:] = batch.b_runs[0]
    single = ops.attention(q[:1], keys, values, ops.plan_attention(alone, None))
    assert torch.equal(together[:1], single)


def test_numbers_that_are_none_stay_so(row, step_over, draw):
    batch = step_over([row(1, (9,)), row(1, (9,))], 60)
    q, keys, values = draw(2, 2, 16), draw(60, 2, 16), draw(60, 2, 16)
    first = batch.b_runs[0][0][0]
    keys[first, 0, 3] = values[first, 0, 3] = float("nan")
    ops = cpu.OPERATIONS
    got = ops.attention(q, keys, values, ops.plan_attention(batch, None))
    assert got[0].isnan().any()
    assert not got[1].isnan().any()


@loop
def _round(address):
    a = arguments(address)
    source = floats(a[FIRST], (a[END],))
    target = tensor(a[FIRST + 1], (a[END],), numba.uint16)
    i = take(a)
    while i < a[END]:
        target[i] = narrow(source[i], numba.uint16)
        i = take(a)


def test_numbers_are_rounded_as_torch_rounds_them():
    random = torch.randint(-(2**31), 2**31, (20_000,), dtype=torch.int32).view(torch.float32)
    ties = (torch.arange(0, 2**20, 2**15, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45])
    numbers = torch.cat([random, ties, -ties, edges])
    got = torch.empty(len(numbers), dtype=torch.bfloat16)
    _round(len(numbers), numbers.data_ptr(), got.data_ptr())
    expected = numbers.bfloat16()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))


def _adds(number):
    def body(address):
        a = arguments(address)
        sums = floats(a[FIRST], (a[END],))
        item = take(a)
        while item < a[END]:
            sums[item] += number
            item = take(a)

    return loop(body)


def test_what_processes_compile_at_once_is_kept_side_by_side(tmp_path, monkeypatch):
    """Each finds an empty folder, as if the other had begun at the same moment."""
    for number in (1, 2):
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / str(number)))
        _adds(number)
    shutil.copytree(tmp_path / "1", tmp_path / "2", dirs_exist_ok=True)
    monkeypatch.setattr(CFunc, "_compile_uncached", None)  # what is kept is found
    for number in (1, 2):
        sums = torch.zeros(2)
        _adds(number)(len(sums), sums.data_ptr())
        assert torch.equal(sums, torch.full((2,), float(number)))


def test_a_process_waits_for_what_another_one_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    _adds(3)
    (kept,) = tmp_path.rglob("*.nbc")
    made = kept.read_bytes()
    kept.unlink()
    other = os.open(kept.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with ThreadPoolExecutor() as threads, monkeypatch.context() as patched:
        patched.setattr(CFunc, "_compile_uncached", None)
        waits = threads.submit(_adds, 3)
        time.sleep(0.1)
        assert not waits.done()
        kept.write_bytes(made)
        fcntl.flock(other, fcntl.LOCK_UN)
        waits.result()
    # Whoever compiles may have been stopped.
    monkeypatch.setattr(loops, "_LONGEST_TURN", 0.0)
    kept.unlink()
    fcntl.flock(other, fcntl.LOCK_EX)
    _adds(3)
    os.close(other)
    assert kept.exists()


def test_code_that_cant_be_kept_or_read_again_is_compiled(tmp_path, monkeypatch, caplog):
    """The disk is full, what was kept is damaged, or its folder has gone."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def runs(number):
        sums = torch.zeros(2)
        _adds(number)(len(sums), sums.data_ptr())
        assert torch.equal(sums, torch.full((2,), float(number)))

    with monkeypatch.context() as full:

        @contextlib.contextmanager
        def fails(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield

        full.setattr(IndexDataCacheFile, "_open_for_write", fails)
        runs(4)
    assert not [*tmp_path.rglob("*.nbc")]
    runs(4)
    (kept,) = tmp_path.rglob("*.nbc")
    kept.write_bytes(kept.read_bytes()[:40])
    runs(4)
    assert {record.message.split(":")[0] for record in caplog.records} == {
        "compiled code can't be kept",
        "compiled code that was kept can't be read",
    }
    with loops._turn_at(str(tmp_path / "gone")):
        pass
