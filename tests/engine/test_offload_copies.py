"""What comes back from the host's memory is bit for bit what went there."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from support.kernels.interpreted import DEVICE
from support.kernels.layouts import alike
from tokenpod.core.plan import PlanRow, StepPlan, plan_of
from tokenpod.engine.gpu.device_copies import DeviceCopies
from tokenpod.engine.steps.offload_copies import OffloadCopies
from tokenpod.kernels.cache.kv_pool import KVLayout, KVPool
from tokenpod.kernels.cache.offload_pool import OffloadPool
from tokenpod.kernels.operations.attention_ops import KVScales

CPU = torch.device("cpu")
SLOTS, OFFLOAD_SLOTS = 40, 30
HEADS, LATENT = [alike(2, 8), alike(1, 24)], [KVLayout(1, 20, 16, shared=True)] * 3
KINDS = {
    "float32": (HEADS, torch.float32),
    "bfloat16": (HEADS, torch.bfloat16),
    "float16": (HEADS, torch.float16),
    "8 bits": ([alike(2, 8)] * 2, torch.float8_e4m3fn),
    "8 bits with scales": (HEADS, torch.int8),
    "latent": (LATENT, torch.bfloat16),
}


def made(kind, device, copies_of):
    """A pool full of random bits, NaNs among them, and its copies."""
    layouts, dtype = KINDS[kind]
    eight = dtype is torch.float8_e4m3fn
    ones = torch.ones(2, device=device)
    scales = [KVScales(ones, ones)] * len(layouts) if eight else None
    pool = KVPool(layouts=layouts, slots=SLOTS, dtype=dtype, device=device, scales=scales)
    for tensor in pool.stored:
        numbers = tensor.view(torch.uint8)
        numbers.copy_(torch.randint(0, 256, numbers.shape, dtype=torch.uint8))
    slot_bytes = KVPool.bytes_per_slot(layouts=layouts, dtype=dtype)
    host = OffloadPool(OFFLOAD_SLOTS, slot_bytes, pinned=device.type == "cuda")
    return pool, copies_of([pool], host)


def step(number, copies, awaited=()):
    """A plan with these copies; host slots are numbered behind the pool's sink."""
    plan = plan_of(number, [PlanRow(0, 0, [0])], copies=copies, awaited=awaited)
    return StepPlan.from_bytes(plan.to_bytes())


def bits(pool):
    return [tensor.view(torch.uint8).clone() for tensor in pool.stored]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on", ["host", "device"])
def test_what_comes_back_is_bit_for_bit_what_went(kind, on, monkeypatch):
    # Pieces of 3 tokens: what is copied takes several.
    monkeypatch.setattr("tokenpod.engine.gpu.device_copies.STAGING_BYTES", 3 * 200)
    if on == "host":
        pool, copies = made(kind, CPU, OffloadCopies)
    else:
        pool, copies = made(kind, DEVICE, partial(DeviceCopies, device=DEVICE))
    first, before = SLOTS + 1, bits(pool)
    sources = [3, 4, 5, 17, 30, 29, 12]
    there = [first + at for at in (0, 1, 2, 9, 8, 20, 29)]
    copies.begin(step(1, [*zip(sources, there, strict=True)]))
    for tensor in pool.stored:
        tensor.view(torch.uint8)[:] = 0
    targets = [20, 21, 3, 5, 7, 39, 1]
    # In the same step something else goes where some of it was: first all goes out.
    pairs = [(0, first + 25), *zip(there, targets, strict=True)]
    copies.begin(step(2, pairs, awaited=[0]))
    assert copies.arrived() is None
    for old, new in zip(before, bits(pool), strict=True):
        assert torch.equal(new[targets], old[sources])
        rest = [slot for slot in range(SLOTS + 1) if slot not in targets]
        assert not new[rest].any()
