"""Beam search is transformers': results, their order and their log probabilities.

Checkpoints are tiny and random. Beams run beside other requests, through prompts in pieces, cached
prefixes and overlapped steps, on one rank and on two.
"""

from __future__ import annotations

import queue
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

from support.checkpoints.golden_kinds import VOCABULARY
from support.steps.lockstep import in_lockstep
from tokenpod.core.outputs import FinishCode, StepOutputs
from tokenpod.core.plan import StepPlan
from tokenpod.core.requests import BeamParams, EarlyStop, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.loop import EngineLoop
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import Shard
from tokenpod.scheduler.scheduler import Limits, Scheduler

CPU = torch.device("cpu")
#: So many that random texts end now and then.
ENDS = [5, 17, 29]
STEPS = {EarlyStop.FALSE: False, EarlyStop.TRUE: True, EarlyStop.NEVER: "never"}
NEW_TOKENS = 14
SLOTS, POSITIONS = 900, 200


@pytest.fixture(scope="module")
def llama(golden):
    return golden("llama")


@pytest.fixture(scope="module")
def model(llama):
    return load_model(llama.folder, dtype=None, device=CPU, progress=lambda done, total: None)


def text(length, seed):
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(length)]


def search(first_id, prompt, width, *, penalty=1.0, early=EarlyStop.FALSE, n=None, **stopping):
    return Request(
        [*range(first_id, first_id + width)],
        prompt,
        SamplingParams(),
        StoppingParams(
            **{"max_new_tokens": NEW_TOKENS, "eos_token_ids": frozenset(ENDS)} | stopping
        ),
        top_n_tokens=width + len(ENDS),
        beam=BeamParams(width, penalty, early, n or width),
    )


def expected(llama, request):
    """[(tokens, score)] of transformers, the best first."""
    beam, stopping, prompt = request.beam, request.stopping, request.prompt
    found = llama.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=beam.width,
        num_return_sequences=beam.n,
        length_penalty=beam.length_penalty,
        early_stopping=STEPS[beam.early_stopping],
        max_new_tokens=stopping.max_new_tokens,
        min_new_tokens=stopping.min_new_tokens or None,
        eos_token_id=sorted(stopping.eos_token_ids) or None,
        pad_token_id=VOCABULARY,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = [
        [t for t in row if t != VOCABULARY] for row in found.sequences[:, len(prompt) :].tolist()
    ]
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


@dataclass
class Heard:
    """The other end of an engine's link."""

    requests: list[Request]
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    sent: bool = False

    @property
    def done(self):
        told = {i for request in self.requests for i in request.reported}
        return told <= {*self.finishes, *self.failures}

    def receive(self, seconds):
        del seconds
        new, self.sent = [] if self.sent else self.requests, True
        return new

    def send(self, message):
        assert isinstance(message, StepOutputs)
        for at, sequence in enumerate(message.sequence_ids):
            assert sequence not in self.finishes
            self.tokens[sequence].append(message.token_ids[at])
            self.logprobs[sequence].append(message.logprobs[at])
            if message.finishes[at]:
                self.finishes[sequence] = message.finishes[at]
        self.started |= {s.sequence_id: s.cached_tokens for s in message.started}
        self.failures += [failure.sequence_id for failure in message.failures]

    def results(self, request):
        return [(self.tokens[i], sum(self.logprobs[i])) for i in request.reported]


def scheduler(prefill=64, rows=20, slots=SLOTS):
    return Scheduler(Limits(slots, rows, POSITIONS, prefill))


def host(model, group=None, rows=21, kv_dtype=torch.float32):
    pool = KVPool(slots=SLOTS + 16, layouts=model.config.kv_layouts, dtype=kv_dtype, device=CPU)
    return CpuExecutor(model, pool, rows=rows, vocab_size=VOCABULARY, group=group)


def serve(executor, requests, planner=None, *, overlap=False):
    """What comes of requests; every step leaves each slot in one place."""
    link, planner = Heard(requests), planner or scheduler()
    loop = EngineLoop(link, planner, executor, overlap=overlap)
    for _ in range(600):
        if link.done:
            break
        loop.turn()
        planner.check()
    assert link.done
    while loop._flying is not None:
        loop.turn()
    planner.check()
    assert planner.load().running == planner.load().waiting == 0
    assert planner.kv.available == planner.kv.total
    return link


def check(llama, link, requests):
    for request in requests:
        penalty = request.beam.length_penalty
        for (ours, total), (theirs, score) in zip(
            link.results(request), expected(llama, request), strict=True
        ):
            assert ours == theirs
            assert total / len(ours) ** penalty == pytest.approx(score, abs=1e-4)


@pytest.mark.compute
@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize("early", EarlyStop)
@pytest.mark.parametrize("penalty", [0.4, 1.0, 2.0])
def test_results_are_those_of_transformers(llama, model, penalty, early):
    requests = [
        search(100 * width, text(7 + width, width), width, penalty=penalty, early=early)
        for width in (2, 4, 8)
    ]
    link = serve(host(model), requests, scheduler(prefill=8), overlap=True)
    check(llama, link, requests)
    ends = {*link.finishes.values()}
    assert ends <= {FinishCode.EOS, FinishCode.LENGTH}
    # Long texts win with a high penalty.
    assert penalty > 1 or FinishCode.EOS in ends


def ordinary(first_id, samples=1):
    sampling = SamplingParams(do_sample=samples > 1, seed=first_id)
    ids = [*range(first_id, first_id + samples)]
    return Request(ids, text(30, first_id), sampling, StoppingParams(20), logprobs=True)


def test_beams_run_beside_others_in_pieces_and_on_cached_prefixes(llama, model):
    alone = [serve(host(model), [each]) for each in (ordinary(900), ordinary(910, 3))]
    planner = scheduler(prefill=8)
    executor = host(model)
    first = search(10, text(40, 1), 4, n=3)
    check(llama, serve(executor, [first], planner, overlap=True), [first])
    again = search(20, [*text(40, 1), 7, 9], 3, min_new_tokens=5)
    same = search(30, text(40, 1), 2, penalty=0.4, early=EarlyStop.TRUE)
    other = search(40, text(25, 3), 4)
    # Two with one prompt at once: the second publishes what the first has published meanwhile.
    twins = [search(50, text(25, 4), 2), search(60, text(25, 4), 3)]
    requests = [again, ordinary(900), same, *twins, other, ordinary(910, 3)]
    link = serve(executor, requests, planner, overlap=True)
    check(llama, link, [again, same, other, *twins])
    assert link.started[20] == 40
    assert link.started[30] == 39
    for heard in alone:
        for sequence, tokens in heard.tokens.items():
            assert link.tokens[sequence] == tokens


@pytest.mark.slow
def test_beams_and_samples_over_a_pool_of_int8(llama, model):
    """Forks read their scales where they read their numbers, whoever wrote them."""
    executor, planner = host(model, kv_dtype=torch.int8), scheduler(prefill=8)
    first, again = search(10, text(40, 1), 2), search(20, [*text(40, 1), 7, 9], 2)
    serve(executor, [first], planner, overlap=True)
    link = serve(executor, [again, ordinary(910, 3)], planner, overlap=True)
    assert link.started[20] == 40
    alone = serve(host(model, kv_dtype=torch.int8), [ordinary(910, 3)])
    for sequence, tokens in alone.tokens.items():
        assert link.tokens[sequence] == tokens
        assert link.logprobs[sequence] == pytest.approx(alone.logprobs[sequence], abs=5e-3)
    for (_, total), (_, score) in zip(link.results(again), expected(llama, again), strict=True):
        assert total / NEW_TOKENS == pytest.approx(score, abs=0.02)


def test_two_ranks_search_as_one_does(llama):
    """The leader plans and samples; the follower gets the plans' bytes, and never top tokens."""
    requests = [search(10, text(20, 5), 4), ordinary(900), search(20, text(9, 6), 2, penalty=2.0)]
    plans: queue.Queue[bytes] = queue.Queue()

    def rank(group):
        model = load_model(
            llama.folder,
            dtype=None,
            device=CPU,
            progress=lambda done, total: None,
            shard=Shard(group.rank, group.world),
            group=group,
        )
        executor = host(model, group)
        if group.rank == 0:
            try:
                return serve(Sending(executor, plans), requests, scheduler(prefill=8), overlap=True)
            finally:
                plans.put(b"")
        while data := plans.get():
            executor.launch(StepPlan.from_bytes(data)).wait()
        return None

    leader, _ = in_lockstep(2, rank)
    check(llama, leader, [requests[0], requests[2]])


@dataclass
class Sending:
    """A leader's executor: what it launches is launched by another one, too."""

    executor: CpuExecutor
    plans: queue.Queue[bytes]

    def launch(self, plan):
        self.plans.put(plan.to_bytes())
        return self.executor.launch(plan)


def test_a_time_limit_ends_a_search_with_what_there_is(llama, model):
    late = search(10, text(9, 2), 4, eos_token_ids=frozenset(), time_limit_at=5)
    ticks = iter(range(1000))
    link = Heard([late])
    loop = EngineLoop(link, scheduler(), host(model), clock=lambda: next(ticks))
    while not link.done:
        loop.turn()
    assert {*link.finishes.values()} == {FinishCode.TIME_LIMIT}
    (length,) = {len(link.tokens[i]) for i in late.reported}
    assert 1 <= length < NEW_TOKENS
    bounded = search(10, text(9, 2), 4, eos_token_ids=frozenset(), max_new_tokens=length)
    check(llama, link, [bounded])
