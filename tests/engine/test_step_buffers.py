"""A device executor has room for every step that may be closed, and steps go up to that."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from support.engines.engine_link import Client
from support.engines.guessing import Guessing
from support.kernels.interpreted import DEVICE
from support.kernels.layouts import alike
from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.core.messages import PROBE_TOKENS, Advance
from tokenpod.core.plan import LAST, PlanRow, plan_of
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import MOST_TOP_TOKENS, SamplingParams
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.gpu.device_executor import DeviceExecutor
from tokenpod.engine.gpu.device_sampler import DeviceSampler, SamplerTiles
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.sampling.sampler import Samples
from tokenpod.kernels.backends import cpu, triton
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.families.qwen2 import QWEN2
from tokenpod.models.specs.weight_table import weights_of
from tokenpod.models.weights.names import Names
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.scheduler import Limits, Scheduler

CPU = torch.device("cpu")
MAX_ROWS, PREFILL, POSITIONS, SLOTS, VOCABULARY, SPECULATE = 64, 200, 256, 4096, 97, 8
LIMITS = Limits(SLOTS - PROBE_TOKENS, MAX_ROWS, POSITIONS, PREFILL, drafts=MOST_DRAFTS)
STEP = LIMITS.step

CONFIG = QWEN2.spec(
    Fields(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-6,
            "torch_dtype": "float32",
        },
        "a test's",
    ),
    None,
)


def model(ops, device):
    generator = torch.Generator().manual_seed(4)
    weights = {
        weight.name: torch.randn(weight.shape, generator=generator).to(device) * 0.3
        for weight in weights_of(CONFIG, Names(), "model.")
    }
    return Decoder(CONFIG, weights, ops)


def pool(device):
    return KVPool(slots=SLOTS, layouts=[alike(2, 16)], dtype=torch.float32, device=device)


def device_executor(device):
    return DeviceExecutor(
        model(triton.OPERATIONS, device),
        pool(device),
        DeviceSampler(
            rows=STEP.rows,
            vocab_size=VOCABULARY,
            device=device,
            most_edits=16,
            tiles=SamplerTiles(split=64, groups=4, block=64, pivots=4),
        ),
        rows=STEP.rows,
        max_positions=POSITIONS,
        max_tokens=STEP.tokens,
        device=device,
        drafts=STEP.drafts,
    )


# -- buffers -----------------------------------------------------------------------------------


class Nothing:
    """Steps that are captured, but for what they compute."""

    def computed(self, integers, rows, *, decode, follow):
        return torch.zeros(len(integers.logit_index), VOCABULARY)

    def follow(self, integers, rows):
        pass

    def draw_masked(self, counts, integers, logits):
        pass

    def first_layers(self):
        return nullcontext()

    def padding(self, counts):
        return torch.zeros(counts.words, dtype=torch.int64)


def step_of(drafts, prompts=(), *, masked=False):
    """A plan of rows that decode, with so many drafts each, and of prompts of so many tokens."""
    rows, at = [], 0
    for row, n in enumerate(drafts):
        slots, at = range(at, at + 1 + n), at + 1 + n
        tokens = [LAST, *[1] * n]
        rows.append(PlanRow(row, 20, slots, tokens, 1 + n, masked=masked))
    for row, n in enumerate(prompts, len(drafts)):
        slots, at = range(at, at + n), at + n
        rows.append(PlanRow(row, 0, slots, [1] * n))
    rows.sort(key=lambda row: len(row.slots) > 1)
    return plan_of(1, rows)


WORST = {
    "all rows decode": step_of([0] * STEP.rows),
    "all drafts, all prompts": step_of([8] * 32 + [0] * 31, [PREFILL, PROBE_TOKENS]),
    "all drafts, one each": step_of([4] * 64 + [0]),
    "two routers' rows and streams": step_of([8] * 32 + [0] * 32),
    "a few rows with all of theirs": step_of([8, 8, 8]),
    "forced tokens in the place of free rows": step_of([8] * 7 + [1], masked=True),
    "all forced": step_of([4] * 64, masked=True),
    "a prompt in a captured step with drafts": step_of([8] * 20 + [0], [150]),
}


@pytest.fixture(scope="module")
def executor():
    made = device_executor(CPU)
    made._captured.capture(Nothing())
    return made


@pytest.mark.parametrize("plan", WORST.values(), ids=WORST)
def test_the_worst_steps_fit_into_every_buffer(plan, executor):
    STEP.check(plan)
    mailbox = executor._free_mailbox(plan)
    for row in range(STEP.rows):
        executor._runs[row] = [(0, 20)]
    if executor._filled(plan, mailbox) is None:
        _, integers = executor._integers(plan, mailbox)
        assert len(integers.logit_index) == plan.samples
    drawn = Samples.nothing(plan.samples, MOST_TOP_TOKENS, CPU, ranks=True)
    posted = mailbox.send(drawn, {})
    assert len(mailbox.receive(posted).tokens) == plan.samples


def test_the_worst_steps_come_up_to_the_limits():
    """Else the test above would show little."""
    plans = WORST.values()
    assert max(plan.rows for plan in plans) == STEP.rows
    # Of the tokens of two prompts two are their rows'.
    assert max(plan.tokens for plan in plans) == STEP.tokens - 2
    assert max(plan.drafts for plan in plans) == STEP.drafts
    assert max(plan.samples for plan in plans) == STEP.samples


def test_a_step_of_drafts_that_are_granted_twice_fits_into_no_buffer(executor):
    """What two routers' calls and streams put into one step when each had a budget of its own."""
    plan = step_of([8] * 45)
    with pytest.raises(AssertionError, match="a step of 360 drafts; executors have room for 256"):
        STEP.check(plan)
    mailbox = executor._free_mailbox(plan)
    with pytest.raises(RuntimeError):
        mailbox.send(Samples.nothing(plan.samples, 0, CPU), {})


# -- the same load, served -----------------------------------------------------------------------

BATCHES = [*range(100, 130)], [*range(200, 230)]
STREAMS = [1, 2, 3, 4]
NEW = 40


class Routers(Client):
    """Two routers with a batch of 30 rows each, whose calls always come together; and streams."""

    def __init__(self):
        super().__init__(ask(i) for i in STREAMS)
        self.op, self.open = 2, {1, 2}
        self.inbox[:0] = [
            Advance(op, [ask(i) for i in ids], [0] * 30, [], False)
            for op, ids in enumerate(BATCHES, 1)
        ]

    def receive(self, seconds):
        if not self.open:
            batches = [[i for i in ids if i not in self.finishes] for ids in BATCHES]
            for batch in filter(None, batches):
                self.op += 1
                self.open.add(self.op)
                self.inbox.append(Advance(self.op, [], [], batch, False))
        return super().receive(seconds)

    def send(self, message):
        super().send(message)
        assert not self.failures
        self.open -= {advanced.op for advanced in message.advanced}


def ask(sequence):
    prompt = [(sequence * 7 + i * i) % VOCABULARY for i in range(3)]
    stopping = StoppingParams(max_new_tokens=NEW)
    sampling = SamplingParams()
    if sequence % 3 == 0:
        sampling = SamplingParams(do_sample=True, temperature=1.3, seed=sequence)
    return Request([sequence], prompt, sampling, stopping, drafts=SPECULATE)


def serve(executor, overlap, expected=None):
    """What all sequences got, and the drafts of the largest step. `expected`: is drafted."""
    drafting = None
    if expected is not None:
        drafting = partial(Drafting, Guessing(expected, 0.9, VOCABULARY), SPECULATE)
    client, most = Routers(), 0
    launch = executor.launch

    def watched(plan):
        nonlocal most
        most = max(most, plan.drafts)
        return launch(plan)

    executor.launch = watched
    loop = EngineLoop(client, Scheduler(LIMITS, drafting=drafting), executor, overlap=overlap)
    everybody = {*STREAMS, *BATCHES[0], *BATCHES[1]}
    for _ in range(1000):
        if everybody <= client.finished:
            return dict(client.tokens), most
        loop.turn()
    raise AssertionError(f"{len(client.finished)} of {len(everybody)} have ended")


def cpu_executor(device):
    return CpuExecutor(
        model(cpu.OPERATIONS, device), pool(device), rows=STEP.rows, vocab_size=VOCABULARY
    )


@pytest.mark.parametrize(
    ("make", "device", "overlap"),
    [
        pytest.param(cpu_executor, CPU, False, id="host"),
        pytest.param(device_executor, DEVICE, False, id="device", marks=pytest.mark.gpu),
        pytest.param(device_executor, DEVICE, True, id="overlapped", marks=pytest.mark.gpu),
    ],
)
def test_two_routers_and_streams_that_draft_in_the_same_steps(make, device, overlap):
    """They get what they would get without drafts, and steps have as many drafts as may be."""
    executors = [make(device), make(device)]
    if make is device_executor:
        for executor in executors:
            executor.capture()
    expected, none = serve(executors[0], overlap)
    got, most = serve(executors[1], overlap, expected)
    routed = len(BATCHES[0]) + len(BATCHES[1])
    # Where steps overlap, none of the streams may be able to draft when both routers do.
    least = MOST_DRAFTS * routed // (routed + len(STREAMS)) if overlap else MOST_DRAFTS
    assert none == 0
    assert least <= most <= MOST_DRAFTS
    assert got == expected
