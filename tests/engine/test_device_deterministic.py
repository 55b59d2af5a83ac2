"""`deterministic` on a GPU: tokens and log probabilities, bit by bit, whatever else is going on."""

from __future__ import annotations

import random

import pytest
import torch

from support.checkpoints.demo import DEMO
from support.engines.demo_engine import POSITIONS, Recorder
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import assemble
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]

ROWS, PREFILL, TOKENS = 96, 2048, 60
DEVICE = torch.device("cuda")
GREEDY = SamplingParams()
SAMPLED = SamplingParams(do_sample=True, temperature=0.9, top_p=0.9, seed=5)


@pytest.fixture(scope="module", params=[True, False], ids=["deterministic", "as fast as it can"])
def made(request):
    model = load_model(
        DEMO,
        dtype=torch.bfloat16,
        device=DEVICE,
        progress=lambda done, total: None,
        deterministic=request.param,
    )
    options = EngineOptions(
        model_folder="",
        dtype="bfloat16",
        device="cuda",
        threads=1,
        max_batch_size=ROWS,
        max_batch_prefill_tokens=PREFILL,
        memory_fraction=0.02,
        deterministic=request.param,
    )
    return request.param, assemble(model, options, positions=POSITIONS, device=DEVICE)


def asked(sequences, first=0):
    chance = random.Random(4)
    prompts = [[chance.randrange(3, 4096) for _ in range(3 + 11 * i % 301)] for i in range(96)]
    return [
        Request([first + i], prompts[i], GREEDY, StoppingParams(TOKENS), logprobs=True)
        for i in sequences
    ]


def crowd():
    """Others who draw, with prompts of all lengths."""
    chance = random.Random(5)
    lengths = [chance.randrange(1, 300) for _ in range(64)]
    prompts = [[chance.randrange(3, 4096) for _ in range(n)] for n in lengths]
    return [
        Request([1000 + i], prompt, SAMPLED, StoppingParams(TOKENS), logprobs=True)
        for i, prompt in enumerate(prompts)
    ]


def serve(executor, slots, requests, scheduler=None, prefill=PREFILL):
    """(tokens, log probabilities) of each sequence; and the scheduler, which has cached them."""
    link = Recorder(requests)
    if scheduler is None:
        executor.release(range(ROWS + 1))
        scheduler = Scheduler(Limits(slots, ROWS, POSITIONS, prefill))
    loop = EngineLoop(link, scheduler, executor, overlap=True)
    while not link.done:
        loop.turn()
    return link, scheduler


def test_every_token_is_the_same_alone_in_company_cut_and_cached(made, capsys):
    deterministic, assembled = made
    executor, slots = assembled.executor, assembled.slots
    which = range(0, 96, 6)
    alone = {}
    for i in which:
        link, _ = serve(executor, slots, asked([i]))
        alone[i] = link.tokens[i], link.logprobs[i]
    company, scheduler = serve(executor, slots, [*crowd(), *asked(which)])
    cached, _ = serve(executor, slots, asked(which, 2000), scheduler)
    assert sum(cached.cached.values()) > 1000
    # Last: another scheduler gives out the slots of what is cached.
    cut, _ = serve(executor, slots, [*crowd()[:9], *asked(which)], prefill=48)
    found = {"company": (company, 0), "cut": (cut, 0), "cached": (cached, 2000)}
    others = {
        name: sum((link.tokens[i + first], link.logprobs[i + first]) != alone[i] for i in which)
        for name, (link, first) in found.items()
    }
    with capsys.disabled():
        print(f"\n{deterministic=}: sequences that differ of {len(which)}: {others}")
    # Without, some do, or this test could not fail.
    assert (sum(others.values()) == 0) == deterministic
