"""Layers with a window have few slots of their own, and say what they say with all of them.

Checkpoints are tiny and random. What a page of window slots held is overwritten with NaN when it is
given to others, so whatever reads it then is found out.
"""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from support.checkpoints.golden_kinds import VOCABULARY
from support.engines.engine_link import Client
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.requests import BeamParams, EarlyStop, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.core.windows import WindowRoom, longest
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import assemble
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = pytest.mark.compute

CPU = torch.device("cpu")
ROWS, SLOTS, POSITIONS, PREFILL = 5, 900, 240, 24


@pytest.fixture
def folder(golden):
    return lambda kind: golden(kind).folder


def load(folder, **more):
    return load_model(folder, dtype=None, device=CPU, progress=lambda done, total: None, **more)


def text(length, seed):
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(length)]


def requests():
    """Long texts, samples of one prompt, a search; prefixes in common, and chats that go on."""
    common, sampled = text(70, 0), SamplingParams(do_sample=True, seed=3)
    yield Request([1], [*common, *text(9, 1)], SamplingParams(), StoppingParams(50), logprobs=True)
    yield Request([2], text(80, 2), sampled, StoppingParams(40), logprobs=True)
    yield Request([3], [*common, *text(30, 3)], sampled, StoppingParams(12), logprobs=True)
    yield Request([4, 5, 6], text(45, 4), sampled, StoppingParams(24), logprobs=True)
    yield Request([7], [*common, *text(5, 5)], SamplingParams(), StoppingParams(24), logprobs=True)
    yield Request(
        [8, 9, 10],
        [*common, *text(20, 6)],
        SamplingParams(),
        StoppingParams(24),
        top_n_tokens=4,
        beam=BeamParams(3, 1.0, EarlyStop.FALSE, 3),
    )
    yield Request([11], [*text(45, 4), 3], sampled, StoppingParams(16), logprobs=True)


def pools(model, room):
    config = model.config
    return KVPool(
        layouts=config.kv_layouts,
        slots=SLOTS + PROBE_TOKENS,
        dtype=model.dtype,
        device=CPU,
        window_slots=room.slots if room else 0,
        windowed=[window is not None for window in config.kv_windows],
    )


def serve(model, room, *, overlap=False, group=None, **limits):
    """What each sequence says, how much of each prompt was cached, and the scheduler."""
    pool = pools(model, room)
    for tensor in pool.stored:
        tensor.fill_(float("nan"))  # what nobody wrote must not be read
    executor = CpuExecutor(model, pool, rows=ROWS + 1, vocab_size=VOCABULARY, group=group)
    limits = {"prefill_tokens": PREFILL} | limits
    scheduler = Scheduler(Limits(SLOTS, ROWS, POSITIONS, windows=room, **limits))
    if room is not None:
        poison(scheduler.kv.windows, pool, room.page)
    link = Client()
    loop = EngineLoop(link, scheduler, executor, overlap=overlap)
    for request in requests():  # some at once, some when others have ended
        link.inbox.append(request)
        link.left |= set(request.reported)
        for _ in range(40):
            loop.turn()
    for _ in range(600):
        if not link.left:
            break
        loop.turn()
        scheduler.check()
    while loop._flying is not None:
        loop.turn()
    scheduler.check()
    assert not link.left
    assert not link.failures
    return link, scheduler


def poison(windows, pool, page):
    evict = windows._evict

    def evict_and_poison(number):
        evict(number)
        for layer, windowed in enumerate(pool.windowed):
            if windowed:
                pool.keys[layer][number * page : (number + 1) * page] = torch.nan
                pool.values[layer][number * page : (number + 1) * page] = torch.nan

    windows._evict = evict_and_poison


def room_for(model, page=4):
    window = longest(model.config.kv_windows)
    room = WindowRoom(window, 0, page=page, taken_back=4)
    return room.for_rows(ROWS + 1, POSITIONS, PREFILL + PROBE_TOKENS)


def check(link, whole):
    assert link.tokens == whole.tokens
    for sequence, logprobs in whole.logprobs.items():
        assert link.logprobs[sequence] == pytest.approx(logprobs, abs=1e-4)


FEW = ["gemma3"]
MORE = ["gpt-oss", "mistral-window", "gemma4", "qwen2-window", "cohere2"]


@pytest.mark.parametrize(
    "kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)]
)
def test_they_say_what_they_say_with_all_slots(kind, folder):
    """Without a cache what was left behind is NaN at once."""
    model = load(folder(kind))
    whole, _ = serve(model, None)
    check(serve(model, room_for(model), overlap=True, prefix_caching=False)[0], whole)


def test_a_long_text_holds_as_much_as_its_window_not_as_its_length(folder):
    model = load(folder("gemma3"))
    room, held = room_for(model), []
    scheduler = Scheduler(
        Limits(SLOTS, ROWS, POSITIONS, PREFILL, windows=room, prefix_caching=False)
    )
    executor = CpuExecutor(model, pools(model, room), rows=ROWS + 1, vocab_size=VOCABULARY)
    link = Client([Request([1], text(30, 0), SamplingParams(), StoppingParams(100))])
    loop = EngineLoop(link, scheduler, executor, overlap=True)
    while link.left:
        loop.turn()
        held.append(scheduler.kv.windows.used)
    assert len(link.tokens[1]) == 100
    # A window of 9, 4 that may be taken back, and pages of 4 that are not full.
    assert max(held[5:]) <= 9 + 4 + 3 * 4
    assert held[-1] == 0


def test_a_start_sets_window_slots_aside_where_that_takes_less_memory(folder):
    model, positions = load(folder("gemma3")), 200
    options = EngineOptions(
        str(folder("gemma3")), "float32", "cpu", 1, 2, 40, max_batch_total_tokens=1500
    )
    made = assemble(model, options, positions=positions, device=CPU)
    room, pool = made.room, made.executor._pool
    assert room.slots == 1500
    # Two rows and a liveness probe's, with 16 pages each, and a step's prompts.
    assert room.windows.slots == pool.window_slots == (3 * 16 + 4) * 16
    sizes = [len(keys) - 1 for keys in pool.keys]
    windowed = [window is not None for window in model.config.kv_windows]
    assert sizes == [pool.window_slots if own else 1500 + PROBE_TOKENS for own in windowed]
    assert f"{pool.window_slots} slots of layers with a window" not in room.slots_from
    assert room.windows_kept == "832 slots apart, for windows of up to 9 tokens"
    whole = msgspec.structs.replace(options, host_kv_bytes=1 << 20)
    kept = assemble(model, whole, positions=positions, device=CPU).room
    assert kept.windows is None
    assert kept.windows_kept == "whole tokens, which the host's memory holds (--host-kv-bytes)"
    many = msgspec.structs.replace(options, max_batch_size=8)
    assert assemble(model, many, positions=positions, device=CPU).room.windows_kept == (
        "whole tokens, since windows of 9 rows would take 2368 slots, and there are 1500 in all"
        " (--max-batch-size)"
    )
    # What it has warmed up with is nobody's: it serves as it should.
    scheduler = Scheduler(Limits(1500, 2, positions, 40, windows=room.windows))
    link, expected = Client(), serve(model, None)[0]
    link.inbox.append(next(requests()))
    loop = EngineLoop(link, scheduler, made.executor, overlap=False)
    while 1 not in link.finished:
        loop.turn()
    assert link.tokens[1] == expected.tokens[1]


def test_prefixes_are_found_as_long_as_their_window_slots_are(folder):
    model = load(folder("mistral-window"))
    whole, _ = serve(model, None)
    link, scheduler = serve(model, room_for(model))
    check(link, whole)
    assert 0 < sum(link.cached.values()) <= sum(whole.cached.values())
    assert scheduler.kv.windows.used < scheduler.kv.total / 2
