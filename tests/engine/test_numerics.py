"""What drafts and preemption change on the fast operations: only tokens whose rivals score alike.

The other half, that logic changes nothing, is in test_drafts.py and test_preemption.py, bit for bit
on the operations that are the specification. Fast operations round otherwise in a step of another
shape, so another token is allowed where the two candidates' scores are as close as the kernels'
tests ask, in at most 1 of 10,000 tokens. Scores are made again: penalties, temperature and noise
included. A model of random weights is the adversary: its candidates lie close together.
"""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from support.engines.demo_engine import (
    CPU,
    ONE_IN,
    TOLERANCE,
    VOCABULARY,
    Recorder,
    many_requests,
    scores,
)
from support.engines.guessing import drafting
from support.engines.planner_probe import preempt_sequence
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.loop import EngineLoop
from tokenpod.kernels.backends.registry import operations_for
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.families.llama import LLAMA
from tokenpod.models.specs.weight_table import weights_of
from tokenpod.scheduler.scheduler import Limits, Scheduler

ROWS, PREFILL, POSITIONS, MOST, SLOTS = 64, 256, 128, 3, 8192
CONFIG = LLAMA.spec(
    Fields(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
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

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def model():
    generator = torch.Generator().manual_seed(6)
    names = LLAMA.names_of(CONFIG)[0]
    weights = {
        weight.name: torch.randn(weight.shape, generator=generator) * 0.2 + (len(weight.shape) < 2)
        for weight in weights_of(CONFIG, names, "")
    }
    return Decoder(CONFIG, weights, operations_for(CPU))


def answer(model, asked, *, overlap=False, preempt=0.0, source=None):
    """The recorder of all requests, and how many sequences were preempted."""
    pool = KVPool(slots=SLOTS, layouts=CONFIG.kv_layouts, dtype=torch.float32, device=CPU)
    executor = CpuExecutor(model, pool, rows=ROWS + 1, vocab_size=VOCABULARY)
    scheduler = Scheduler(Limits(SLOTS - 16, ROWS, POSITIONS, PREFILL), drafting=source)
    link = Recorder(asked)
    loop = EngineLoop(link, scheduler, executor, overlap=overlap)
    chance, preempted = random.Random(3), 0
    while not link.done:
        for sequence in [*loop.scheduler._sequences] if preempt else ():
            if chance.random() < preempt:
                preempted += preempt_sequence(scheduler, sequence)
        loop.turn()
    return link, preempted


@pytest.fixture(
    scope="module",
    params=[(16, 40), pytest.param((1001, 100), marks=pytest.mark.slow)],
    ids=["640 tokens", "100,100 tokens"],
)
def undisturbed(request, model):
    """How many sequences of how many tokens; the requests, and their tokens."""
    asked = many_requests(*request.param)
    return request.param, asked, answer(model, asked)[0].tokens


@pytest.mark.parametrize("what", ["drafts", "preemption"])
def test_another_token_is_chosen_only_where_rounding_decides(model, undisturbed, what, capsys):
    (sequences, tokens), asked, before = undisturbed
    if what == "drafts":
        source = drafting(before, "random", MOST, VOCABULARY)
        drafted = [msgspec.structs.replace(request, drafts=MOST) for request in asked]
        link, _ = answer(model, drafted, overlap=True, source=source)
        assert link.drafted[1] > sequences * tokens // 8
    else:
        link, preempted = answer(model, asked, overlap=True, preempt=0.01)
        assert preempted > sequences // 8
    same, gaps = 0, []
    for request in asked:
        ours, theirs = before[request.sequence_ids[0]], link.tokens[request.sequence_ids[0]]
        at = next((i for i in range(tokens) if ours[i] != theirs[i]), tokens)
        same += at
        if at < tokens:
            found = scores(model, request, ours[:at])
            gaps.append(abs(float(found[ours[at]] - found[theirs[at]])))
        if sequences < 100:  # these are the scores that tokens are chosen by
            found = scores(model, request, ours[: at // 2])
            assert found.max() - found[ours[at // 2]] < TOLERANCE
    with capsys.disabled():
        print(
            f"\n{what}: {len(gaps)} of {same + len(gaps)} tokens differ, "
            f"their scores by {max(gaps, default=0.0):.2g} at most"
        )
    assert max(gaps, default=0.0) < TOLERANCE
    assert same > sequences * tokens // 2
    assert len(gaps) <= max(same // ONE_IN, tokens < 100)
