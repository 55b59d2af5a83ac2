"""What drafts and preemption change on a GPU: only tokens whose rivals score alike.

The other half, that logic changes nothing, is in test_drafts.py and test_preemption.py, bit for bit
on the operations that are the specification. Scores are the CPU's in float32: penalties,
temperature and noise included.
"""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from support.checkpoints.demo import DEMO
from support.engines.demo_engine import (
    ONE_IN,
    POSITIONS,
    VOCABULARY,
    Recorder,
    demo_model,
    many_requests,
    scores,
)
from support.engines.guessing import drafting
from support.engines.planner_probe import preempt_sequence
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import assemble
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SEQUENCES, TOKENS, ROWS, PREFILL, MOST = 201, 100, 64, 256, 3
DEVICE = torch.device("cuda")
#: How far apart scores of two candidates may be, by what the model computes in.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


@pytest.fixture(scope="module", params=list(TOLERANCE))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def made(kind):
    model = load_model(
        DEMO, dtype=getattr(torch, kind), device=DEVICE, progress=lambda done, total: None
    )
    options = EngineOptions(
        model_folder="",
        dtype=kind,
        device="cuda",
        threads=1,
        max_batch_size=ROWS,
        max_batch_prefill_tokens=PREFILL,
        memory_fraction=0.01,
        speculate=MOST,
    )
    return assemble(model, options, positions=POSITIONS, device=DEVICE)


def answer(made, asked, preempt=0.0, source=None):
    """The tokens of each request, and how many drafts were accepted and sequences preempted."""
    link = Recorder(asked)
    made.executor.release(range(ROWS + 1))
    scheduler = Scheduler(Limits(made.slots, ROWS, POSITIONS, PREFILL), drafting=source)
    loop = EngineLoop(link, scheduler, made.executor, overlap=made.overlap)
    chance, preempted = random.Random(3), 0
    while not link.done:
        for sequence in link.requests if preempt else ():
            if chance.random() < preempt:
                preempted += preempt_sequence(scheduler, sequence)
        loop.turn()
    return link.tokens, link.drafted[1], preempted


@pytest.fixture(scope="module")
def undisturbed(made):
    return answer(made, many_requests(SEQUENCES, TOKENS))[0]


@pytest.mark.parametrize("what", ["drafts", "preemption"])
def test_another_token_is_chosen_only_where_rounding_decides(made, kind, undisturbed, what, capsys):
    asked = many_requests(SEQUENCES, TOKENS)
    if what != "preemption":
        source = drafting(undisturbed, "random", MOST, VOCABULARY)
        drafted = [msgspec.structs.replace(request, drafts=MOST) for request in asked]
        got, accepted, _ = answer(made, drafted, source=source)
        assert accepted > SEQUENCES * TOKENS // 8
    else:
        got, _, preempted = answer(made, asked, preempt=0.01)
        assert preempted > SEQUENCES // 8
    peer, same, gaps = demo_model(), 0, []
    for request in asked:
        ours, theirs = undisturbed[request.sequence_ids[0]], got[request.sequence_ids[0]]
        at = next((i for i in range(TOKENS) if ours[i] != theirs[i]), TOKENS)
        same += at
        if at < TOKENS:
            found = scores(peer, request, ours[:at])
            gaps.append(abs(float(found[ours[at]] - found[theirs[at]])))
    with capsys.disabled():
        print(
            f"\n{kind}, {what}: {len(gaps)} of {same + len(gaps)} tokens differ, "
            f"their scores by {max(gaps, default=0.0):.2g} at most"
        )
    assert max(gaps, default=0.0) < TOLERANCE[kind]
    assert same > SEQUENCES * TOKENS // 8
    if kind == "float32":
        assert len(gaps) <= max(same // ONE_IN, 1)
