"""An engine whose executor is a GPU's says what the CPU's says, settled at once and overlapped."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from support.engines.engine_link import Client
from support.engines.guessing import drafting
from support.engines.planner_probe import preempt_sequence
from support.kernels.interpreted import DEVICE
from support.kernels.layouts import alike
from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.core.plan import LAST, PlanRow, plan_of
from tokenpod.core.requests import BeamParams, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.core.windows import WindowRoom
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.gpu import graphs
from tokenpod.engine.gpu.device_executor import DeviceExecutor
from tokenpod.engine.gpu.device_sampler import DeviceSampler, SamplerTiles
from tokenpod.engine.gpu.graphs import Graphs, decode_counts, ladder
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.steps.first_steps import run_worst_steps, worst_step
from tokenpod.engine.steps.integers import Counts, fill, pad, views
from tokenpod.kernels.backends import cpu, reference, triton
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.offload_pool import OffloadPool
from tokenpod.kernels.operations.attention_ops import KVScales
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.families.qwen2 import QWEN2
from tokenpod.models.specs.weight_table import weights_of
from tokenpod.models.weights.names import Names
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = pytest.mark.compute

CPU = torch.device("cpu")
ROWS, SLOTS, POSITIONS, PREFILL, VOCABULARY = 6, 160, 64, 12, 97

CONFIG = QWEN2.spec(
    Fields(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 100.0,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "torch_dtype": "float32",
        },
        "a test's",
    ),
    None,
)


#: Interpreted, products, rotation and writes to the pool take minutes; they have their own tests.
OPERATIONS = triton.OPERATIONS
if DEVICE.type == "cpu":
    OPERATIONS = replace(
        triton.OPERATIONS,
        rotate=reference.OPERATIONS.rotate,
        store_key_value=reference.OPERATIONS.store_key_value,
        prepare_linear=reference.OPERATIONS.prepare_linear,
        prepare_norm_linear=reference.OPERATIONS.prepare_norm_linear,
        prepare_add_linear=reference.OPERATIONS.prepare_add_linear,
    )


def model(ops, device, poison=None):
    generator = torch.Generator().manual_seed(4)
    weights = {}
    for weight in weights_of(CONFIG, Names(), "model."):
        weights[weight.name] = torch.randn(weight.shape, generator=generator).to(device) * 0.3
    if poison is not None:
        weights["embedding"][poison] = torch.nan
    return Decoder(CONFIG, weights, ops)


#: The upper layer has a window.
WINDOWS = WindowRoom(9, 0, page=4, taken_back=6).for_rows(ROWS + 1, POSITIONS, 16 + PREFILL)


def pool(device, scales=None, windows=None):
    dtype = torch.float32 if scales is None else torch.float8_e4m3fn
    return KVPool(
        layouts=[alike(2, 16)] * 2,
        slots=SLOTS,
        dtype=dtype,
        device=device,
        scales=scales and [KVScales(*(x.to(device) for x in layer)) for layer in scales],
        window_slots=windows.slots if windows else 0,
        windowed=[False, True],
    )


def engine(executor, overlap, drafting=None, offload_slots=0, windows=None):
    limits = Limits(
        slots=SLOTS - PROBE_TOKENS,
        max_rows=ROWS,
        max_positions=POSITIONS,
        prefill_tokens=PREFILL,
        offload_slots=offload_slots,
        offload_block=4,
        windows=windows,
    )
    swap = PREEMPTIONS["swap"](1)
    link, scheduler = Client(), Scheduler(limits, drafting=drafting, preemption=swap)
    return EngineLoop(link, scheduler, executor, overlap=overlap), link


def on_cpu():
    executor = CpuExecutor(model(cpu.OPERATIONS, CPU), pool(CPU), rows=ROWS, vocab_size=VOCABULARY)
    return engine(executor, overlap=False)


def on_device(
    overlap,
    captured=True,
    poison=None,
    scales=None,
    ops=OPERATIONS,
    guesses=None,
    offload_slots=0,
    windows=None,
    some=False,
):
    offload = (
        OffloadPool(offload_slots, 512, pinned=DEVICE.type == "cuda") if offload_slots else None
    )
    drafts = 3 * ROWS if guesses else 0
    executor = DeviceExecutor(
        model(ops, DEVICE, poison),
        pool(DEVICE, scales, windows),
        DeviceSampler(
            rows=ROWS,
            vocab_size=VOCABULARY,
            device=DEVICE,
            most_edits=16,
            tiles=SamplerTiles(split=64, groups=4, block=64, pivots=4),
        ),
        rows=ROWS,
        max_positions=POSITIONS,
        max_tokens=ROWS + PREFILL + drafts,
        device=DEVICE,
        drafts=drafts,
        offload=offload,
        windowed=windows is not None,
    )
    if captured:
        executor.capture(some=some)
    return engine(executor, overlap, guesses, offload_slots, windows)


def on_guessing_device():
    return on_device(overlap=False, captured=False, guesses=drafting({}, "right", 3, VOCABULARY))


SAMPLED = SamplingParams(do_sample=True, temperature=1.3, top_k=20, seed=7)
PENALISED = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.6, top_of_processed=True)


def requests():
    """Greedy and sampled, penalised, scored, shared prefixes, several samples, all lengths.

    Top tokens of raw logits, and of what is drawn from.
    """
    prompts = [[(7 * i + j * j) % VOCABULARY for j in range(3 + 5 * i)] for i in range(4)]
    kinds = [SamplingParams(), SAMPLED, PENALISED, SAMPLED]
    for i, (prompt, sampling) in enumerate(zip(prompts, kinds, strict=True)):
        yield Request(
            [10 + i],
            prompt,
            sampling,
            StoppingParams(max_new_tokens=3 + i),
            logprobs=True,
            top_n_tokens=3 if i in (1, 2) else 0,
            prompt_logprobs=i == 3,
        )
    yield Request([20, 21], prompts[2], SAMPLED, StoppingParams(max_new_tokens=4), logprobs=True)


def run(loop, link, preempted=None, drafts=0, each_turn=lambda: None):
    """Answer the requests; before turns, by turn, some sequences are preempted."""
    waiting = [msgspec.structs.replace(request, drafts=drafts) for request in requests()]
    # The last one comes when the prompt that it shares is in the cache.
    link.inbox += waiting[:-1]
    for turn in range(200):
        if turn == 8:
            link.inbox.append(waiting[-1])
        for sequence in (preempted or {}).get(turn, ()):
            assert preempt_sequence(loop.scheduler, sequence)
        if turn > 8 and len(link.finished) == 6:
            assert not link.codes
            return link
        each_turn()
        loop.turn()
    raise AssertionError(f"only {link.finished} finished")


@pytest.fixture(scope="module")
def expected():
    return run(*on_cpu())


@pytest.mark.parametrize(
    ("overlap", "captured", "windows"),
    [
        pytest.param(False, True, None, marks=pytest.mark.gpu, id="settled at once"),
        pytest.param(True, False, None, marks=pytest.mark.gpu, id="kernel by kernel"),
        pytest.param(True, True, None, id="overlapped, captured"),
        pytest.param(True, True, WINDOWS, id="window slots, captured"),
        pytest.param(False, False, WINDOWS, marks=pytest.mark.slow, id="window slots"),
    ],
)
def test_the_device_samples_what_the_host_samples(overlap, captured, windows, expected):
    got = run(*on_device(overlap, captured, windows=windows))
    assert dict(got.tokens) == dict(expected.tokens)
    assert dict(got.tops) == dict(expected.tops)
    for sequence, logprobs in expected.logprobs.items():
        assert got.logprobs[sequence] == pytest.approx(logprobs, abs=1e-4)
    assert got.scored.keys() == expected.scored.keys() != set()
    for sequence, logprobs in expected.scored.items():
        assert got.scored[sequence] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [None, WINDOWS], ids=["no windows", "window slots"])
def test_deterministic_steps_say_the_same_of_a_request_alone_and_beside_others(windows):
    """Bit for bit, with prompts cut where others leave room, and with prefixes that are cached."""
    ops = triton.DETERMINISTIC
    if DEVICE.type == "cpu":  # these go token by token
        rotate, store = reference.OPERATIONS.rotate, reference.OPERATIONS.store_key_value
        ops = replace(ops, rotate=rotate, store_key_value=store)
    together = run(*on_device(True, windows=windows, ops=ops))
    assert together.cached[20] > 0
    for request in requests():
        loop, link = on_device(False, captured=False, windows=windows, ops=ops)
        link.inbox.append(request)
        while len(link.finished) < len(request.sequence_ids):
            loop.turn()
        for sequence in request.sequence_ids:
            assert link.tokens[sequence] == together.tokens[sequence]
            assert link.logprobs[sequence] == together.logprobs[sequence]
            assert link.scored.get(sequence) == together.scored.get(sequence)


def test_sizes_are_captured_while_nothing_runs_and_others_stand_in_for_them(monkeypatch, expected):
    """Of each kind the largest alone at first, then some, and then all."""
    monkeypatch.setattr(graphs, "_coarse", lambda size, most: size == most)
    for captured in (99, 2):
        loop, link = on_device(True, some=True)
        loop.captures = loop.executor
        for _ in range(captured):
            if loop.captures is not None:
                loop.turn()
        if captured == 99:  # as those that are captured at once
            assert loop.captures is None
            continue
        late, loop.captures = loop.captures, None
        got = run(loop, link)
        assert dict(got.tokens) == dict(expected.tokens)
        assert dict(got.tops) == dict(expected.tops)
        assert late.capture_next()


def test_nothing_is_captured_while_a_request_is_served():
    class Counts:
        asked = 0

        def capture_next(self):
            assert not loop.scheduler.busy
            self.asked += 1
            return self.asked < 3

    loop, link = on_device(True, captured=False)
    loop.captures = counts = Counts()
    link.inbox += [*requests()][:1]
    while not link.finished:
        loop.turn()
        assert not counts.asked or link.finished
    while loop.captures is not None:
        loop.turn()
    assert counts.asked == 3


def test_a_few_sizes_stand_in_for_all_others_until_these_are_captured():
    """Each pads to half as much again, at most, and few tokens to four times as many."""

    def run(counts, integers):
        return torch.zeros(counts.rows)

    def padding(counts):
        return torch.zeros(counts.words, dtype=torch.int64)

    ladder = decode_counts(1025)
    few, all_of_them = (Graphs(run, ladder, padding, some=some) for some in (True, False))
    found = [few.fitting(size).counts.rows for size in range(1, 1026)]
    for size, got in enumerate(found, 1):
        assert size <= got <= (4 if size <= 64 else 1.51) * size
    assert len({*found}) < len(ladder) // 2
    while few.capture_next():
        assert few.fitting(1025).counts.rows == 1025
    sizes = [[g.fitting(n).counts.rows for n in range(1, 1026)] for g in (few, all_of_them)]
    assert sizes[0] == sizes[1]
    powers = Graphs(run, ladder, padding, some=True, powers=True)
    assert all(powers.fitting(1 << n).counts.rows == 1 << n for n in range(11))
    assert powers.fitting(3).counts.rows == 4


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["right", "random"])
def test_drafts_change_nothing_of_what_is_sampled(kind, expected):
    guesses = drafting(expected.tokens, kind, 3, VOCABULARY)
    loop, link = on_device(overlap=True, guesses=guesses)
    got = run(loop, link, drafts=3)
    assert loop.scheduler.load().accepted_tokens > 3
    assert dict(got.tokens) == dict(expected.tokens)
    assert dict(got.tops) == dict(expected.tops)
    for sequence, logprobs in expected.logprobs.items():
        assert got.logprobs[sequence] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("offload_slots", [0, 200], ids=["computed again", "swapped"])
def test_preempted_rows_sample_what_they_would_have_sampled(expected, offload_slots):
    loop, link = on_device(overlap=True, offload_slots=offload_slots)
    kv = loop.scheduler.kv
    # In the middle of a prompt that is scored, after it, and one of two samples.
    preempted = {3: [13], 4: [11, 12], 8: [13], 12: [21]}
    forgotten = kv.total if offload_slots else 0
    got = run(loop, link, preempted, each_turn=lambda: kv.evict(forgotten))
    assert (loop.scheduler.load().fetched_tokens > 20) == (offload_slots > 0)
    assert dict(got.tokens) == dict(expected.tokens)
    assert dict(got.tops) == dict(expected.tops)
    for sequence, logprobs in expected.logprobs.items():
        assert got.logprobs[sequence] == pytest.approx(logprobs, abs=1e-4)
    assert got.scored.keys() == expected.scored.keys()
    for sequence, logprobs in expected.scored.items():
        assert got.scored[sequence] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.slow
def test_a_search_on_the_device_finds_what_one_on_the_host_finds():
    def searched(loop, link):
        beam = Request(
            [1, 2, 3],
            [9, 4, 7, 30, 2],
            SamplingParams(),
            StoppingParams(max_new_tokens=4, eos_token_ids=frozenset({11})),
            top_n_tokens=4,
            beam=BeamParams(width=3, n=2),
        )
        other = Request([9], [5, 3, 8], SAMPLED, StoppingParams(max_new_tokens=4), logprobs=True)
        link.inbox += [beam, other]
        while not {1, 2, 9} <= link.finished:
            loop.turn()
        return link

    host, device = searched(*on_cpu()), searched(*on_device(overlap=True))
    assert dict(device.tokens) == dict(host.tokens)
    for sequence, logprobs in host.logprobs.items():
        assert device.logprobs[sequence] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.gpu
def test_a_row_of_nan_fails_alone_and_leaves_nothing_behind():
    poison = 96
    healthy = [
        Request([i], [5 + i, 3, 8], SAMPLED, StoppingParams(max_new_tokens=4)) for i in range(2)
    ]
    sick = Request([9], [4, poison, 2], SamplingParams(), StoppingParams(max_new_tokens=4))
    # Gets the slots that held NaN.
    late = Request([30], list(range(20)), SAMPLED, StoppingParams(max_new_tokens=2))

    def tokens(requests):
        loop, link = on_device(overlap=True, captured=False, poison=poison)
        link.inbox += requests
        for turn in range(12):
            if turn == 6:
                link.inbox.append(late)
            loop.turn()
        return link

    got, expected = tokens([healthy[0], sick, healthy[1]]), tokens(healthy)
    assert got.failures == {9: "the model computed NaN or Inf for this sequence"}
    assert got.finished == expected.finished == {0, 1, 30}
    assert all(got.tokens[i] == expected.tokens[i] for i in (0, 1, 30))


@pytest.mark.gpu
def test_keys_and_values_of_8_bits():
    scales = [KVScales(torch.tensor([0.03, 0.07]), torch.tensor([0.1, 0.02]))] * 2
    definition = replace(
        OPERATIONS,
        rotate=reference.OPERATIONS.rotate,
        store_key_value=reference.OPERATIONS.store_key_value,
        plan_attention=reference.OPERATIONS.plan_attention,
        attention=reference.OPERATIONS.attention,
    )

    def generated(ops):
        loop, link = on_device(overlap=False, captured=False, scales=scales, ops=ops)
        prompt = [(j * j + 3) % VOCABULARY for j in range(17)]
        stop = StoppingParams(max_new_tokens=3)
        link.inbox.append(Request([7], prompt, SamplingParams(), stop, logprobs=True))
        while 7 not in link.finished:
            loop.turn()
        return link

    got, expected = generated(OPERATIONS), generated(definition)
    assert got.tokens == expected.tokens
    # Where rotation differs in the last place, a number may end on the next multiple.
    assert got.logprobs[7] == pytest.approx(expected.logprobs[7], abs=0.02)


@pytest.mark.parametrize("scattered", [pytest.param(False, marks=pytest.mark.gpu), True])
def test_the_worst_step_runs(scattered):
    loop, _ = on_device(overlap=False, captured=False)
    plan = worst_step(ROWS, PREFILL, POSITIONS, scattered=scattered)
    assert plan.tokens == ROWS - 1 + PREFILL
    result = loop.executor.launch(plan).wait()
    assert len(result.tokens) == ROWS
    assert sum(len(scores.logprobs) for scores in result.scored.values()) == PREFILL


@pytest.mark.parametrize("make", [on_cpu, pytest.param(on_guessing_device, marks=pytest.mark.gpu)])
def test_the_worst_step_has_room_for_drafts(make):
    loop, _ = make()
    plan = worst_step(ROWS, PREFILL, POSITIONS, scattered=True, drafts=(8, 3))
    assert plan.r_samples.tolist() == [1, 1, 4, 4, 3, 1]
    assert plan.tokens == ROWS - 1 + PREFILL + 8
    result = loop.executor.launch(plan).wait()
    assert len(result.tokens) == ROWS + 8


@pytest.mark.gpu
def test_worst_steps_change_nothing_of_what_follows():
    def generated(after_worst_steps):
        loop, link = on_device(overlap=True, captured=False)
        if after_worst_steps:
            run_worst_steps(loop.executor, ROWS, PREFILL, POSITIONS)
        stop = StoppingParams(max_new_tokens=3)
        link.inbox.append(Request([7], [3, 1, 2], SAMPLED, stop, logprobs=True))
        while 7 not in link.finished:
            loop.turn()
        return link.tokens[7], link.logprobs[7]

    assert generated(after_worst_steps=True) == generated(after_worst_steps=False)


def test_integers_reach_the_device_as_they_were_filled_in():
    rows = [
        PlanRow(4, 9, [31], output=3),
        PlanRow(1, 0, [5], [77]),
        PlanRow(2, 3, [8, 2, 6], [1, 2, 3], samples=0),
    ]
    counts = Counts(5, 3, 2)
    words = np.full(counts.words, -9, np.int64)
    fill(views(words, counts), plan_of(1, rows))
    tensors = views(torch.from_numpy(words.copy()), counts)
    assert tensors.t_token.tolist() == [LAST, 77, 1, 2, 3]
    assert tensors.t_place.tolist() == [9, 0, 3, 4, 5]
    assert tensors.t_slot.tolist() == [31, 5, 8, 2, 6]
    assert tensors.t_row.tolist() == [4, 1, 2, 2, 2]
    assert tensors.logit_index.tolist() == [0, 1]
    assert tensors.sample_row.tolist() == [4, 1]
    assert tensors.sample_position.tolist() == [3, 0]
    assert tensors.b_row.tolist() == [4, 1, 2]
    assert tensors.b_start.tolist() == [0, 1, 2, 5]
    assert tensors.b_context.tolist() == [10, 1, 6]
    assert tensors.b_row.dtype == tensors.b_start.dtype == tensors.b_context.dtype == torch.int32


def test_a_row_may_sample_several_of_its_last_places():
    """First each row's first, then, after room for more rows, what comes behind drafts."""
    rows = [
        PlanRow(4, 9, [31], output=3),
        PlanRow(2, 3, [8, 2, 6], [1, 2, 3], samples=3, output=5),
        PlanRow(1, 0, [4, 5], [1, 2], samples=0),
        PlanRow(3, 7, [9, 10], [1, 2], samples=2, output=2),
    ]
    counts = Counts(8, 4, samples=4, drafts=5)
    words = np.full(counts.words, -9, np.int64)
    integers, plan = views(words, counts), plan_of(1, rows)
    fill(integers, plan)
    pad(integers, plan, padding_row=6, sink=160)
    assert integers.logit_index.tolist() == [0, 1, 6, 0, 2, 7, 3, 0, 0]
    assert integers.sample_row.tolist() == [4, 2, 3, 6]
    assert integers.sample_position.tolist() == [3, 5, 2, 0]


def test_padding_reads_nothing_and_writes_to_the_sink():
    plan = plan_of(1, [PlanRow(2, 6, [40], output=5), PlanRow(3, 1, [50, 51], [8, 9])])
    counts = Counts(6, 4, 4, tiles=8)
    words = np.full(counts.words, -9, np.int64)
    integers = views(words, counts)
    fill(integers, plan)
    pad(integers, plan, padding_row=6, sink=160)
    assert integers.t_token.tolist() == [LAST, 8, 9, 0, 0, 0]
    assert integers.t_slot.tolist() == [40, 50, 51, 160, 160, 160]
    assert integers.t_row.tolist() == [2, 3, 3, 6, 6, 6]
    assert integers.logit_index.tolist() == [0, 2, 0, 0]
    assert integers.sample_row.tolist() == [2, 3, 6, 6]
    # Rows of several tokens are known by their tiles only.
    assert integers.b_row.tolist() == [2, 6, 6, 6]
    assert integers.b_context.tolist() == [7, 0, 0, 0]


def test_padding_samples_what_is_sampled_already():
    """So whatever is noted of samples is never another token's, which may be the same row's."""
    plan = plan_of(1, [PlanRow(3, 1, [50, 51], [8, 9])])
    counts = Counts(6, 3, 3, tiles=8, drafts=2)
    integers = views(np.full(counts.words, -9, np.int64), counts)
    fill(integers, plan)
    pad(integers, plan, padding_row=6, sink=160)
    assert integers.logit_index.tolist() == [1] * 5


def test_fields_are_aligned_whatever_their_lengths():
    for tokens in (1, 2, 3, 17):
        counts = Counts(tokens, 3, 2, tiles=5, drafts=1, adapters=True, windows=True)
        words = torch.zeros(counts.words, dtype=torch.int64)
        fields = views(words, counts)
        offsets = [getattr(fields, name).data_ptr() - words.data_ptr() for name in fields.__slots__]
        assert all(offset % 128 == 0 for offset in offsets)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 11, 64, 100, 256, 1000])
def test_the_ladder_wastes_little(most):
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows <= max(rows / 8, 7 if rows > 8 else 3)
    assert len(sizes) <= 48
