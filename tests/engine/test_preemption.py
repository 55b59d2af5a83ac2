"""Preemption never changes a request's tokens: through the engine's loop, with the demo model.

The logic is exact where arithmetic is: with every token computed by itself the outputs are the same
bit for bit. The fast operations round otherwise in a step of another shape, so another token is
allowed where the two candidates' scores are as close as the kernels' tests ask, in at most 1 of
10,000 tokens.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
import ranks
import row_by_row
import torch
from harness import free_port
from ranks import Job

import tokenpod.models.demo
from tokenpod.core.messages import (
    Advance,
    EngineOptions,
    Request,
    SamplingParams,
    StepOutputs,
    StoppingParams,
)
from tokenpod.core.plan import NewRow, PlanRow, plan_of
from tokenpod.core.sampling import DRAWS
from tokenpod.engine.host_executor import HostExecutor
from tokenpod.engine.host_sampler import HostSampler, counters, tempered
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.rng import vocabulary_noise
from tokenpod.kernels.pool import KVPool, alike
from tokenpod.models import load as loading
from tokenpod.scheduler.scheduler import Limits, Scheduler

CPU = torch.device("cpu")
DEMO = Path(tokenpod.models.demo.__file__).parent
SLOTS, POSITIONS, VOCABULARY = 1200, 400, 4096

GREEDY = SamplingParams()
SAMPLED = SamplingParams(do_sample=True, temperature=0.9, seed=5)
CUT = SamplingParams(do_sample=True, temperature=1.1, top_k=40, top_p=0.95, typical_p=0.9, seed=6)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
WATERMARKED = SamplingParams(
    do_sample=True, watermark=True, relative_frequency_penalty=0.5, seed=9, logit_bias={17: 2.0}
)
KINDS = [GREEDY, SAMPLED, CUT, PENALISED, WATERMARKED]


def load(operations):
    with pytest.MonkeyPatch.context() as patch:
        if operations is not None:
            patch.setattr(loading, "operations_for", lambda device, dtype: operations)
        return loading.load_model(
            DEMO, dtype=torch.float32, device=CPU, progress=lambda done, total: None
        )


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exact():
    return row_by_row.RowByRow(load(row_by_row.OPERATIONS))


@pytest.fixture(scope="module")
def fast():
    return load(None)


def pool(slots):
    return KVPool(slots=slots, layouts=[alike(2, 64)] * 8, dtype=torch.float32, device=CPU)


class Recorder:
    """The other end of an engine's link: a router's step follows the one before."""

    def __init__(self, requests, routed=()):
        self.requests = {i: request for request in requests for i in request.sequence_ids}
        self.inbox: list[object] = list(requests)
        self.routed = {request.sequence_ids[0]: request for request in routed}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.tops: dict[int, list[list[int]]] = defaultdict(list)
        self.scored: dict[int, list[float]] = {}
        self.started: list[int] = []
        self.finished: set[int] = set()
        self.preemptions = 0
        if routed:
            self.inbox.append(Advance(1, list(routed), [3] * len(routed), [], waits=True))

    @property
    def done(self) -> bool:
        return self.finished == {*self.requests, *self.routed}

    def receive(self, seconds):
        del seconds
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message):
        assert isinstance(message, StepOutputs)
        assert not message.failures
        self.preemptions = message.load.preemptions
        for i, sequence in enumerate(message.sequence_ids):
            assert sequence not in self.finished
            self.tokens[sequence].append(message.token_ids[i])
            self.logprobs[sequence].append(message.logprobs[i])
            if message.finishes[i]:
                self.finished.add(sequence)
        for top in message.tops:
            self.tops[message.sequence_ids[top.at]].append(top.token_ids)
        for started in message.started:
            self.started.append(started.sequence_id)
            if started.prompt_logprobs:
                self.scored[started.sequence_id] = started.prompt_logprobs
        for advanced in message.advanced:
            assert advanced.failure is None
            going_on = sorted(self.routed.keys() - self.finished)
            if going_on:
                self.inbox.append(Advance(advanced.op + 1, [], [], going_on, waits=True))


def serve(model, link, *, rows, prefill, overlap, preempt=0.0, slots=SLOTS):
    """Answer a recorder's requests; before each turn every sequence is preempted by chance."""
    executor = HostExecutor(model, pool(slots), rows=rows, vocab_size=VOCABULARY)
    scheduler = Scheduler(Limits(slots - 16, rows - 1, POSITIONS, prefill))
    loop = EngineLoop(link, scheduler, executor, overlap=overlap)
    chance, preempted = random.Random(3), 0
    for _ in range(5000):
        if link.done:
            break
        for sequence in [*link.requests, *link.routed]:
            if chance.random() < preempt:
                preempted += scheduler.preempt(sequence)
        loop.turn()
    assert link.done
    assert link.preemptions == preempted
    assert loop.scores_held == 0
    assert sorted(link.started) == sorted(link.finished)
    scheduler.check()
    return link, preempted


def requests():
    """Every kind of sampling; several samples, common prefixes, scores, top tokens, early ends."""
    chance = random.Random(1)
    stops = StoppingParams(14, min_new_tokens=3, stop_token_ids=frozenset(range(3, 4096, 12)))
    prompts = [[chance.randrange(3, 4096) for _ in range(2 + 5 * i)] for i in range(5)]
    made = [
        Request(
            [i + 1],
            prompts[i],
            sampling,
            StoppingParams(9),
            logprobs=True,
            top_n_tokens=3 * (i == 1),
            prompt_logprobs=i == 4,
        )
        for i, sampling in enumerate(KINDS)
    ]
    made.append(Request([11, 12, 13], prompts[3], SAMPLED, stops, logprobs=True))
    made.append(Request([14, 15], [*prompts[3], 7], CUT, stops, logprobs=True, priority=1))
    return made


def routed():
    return [
        Request([21], list(range(40, 51)), GREEDY, StoppingParams(8), logprobs=True),
        Request([22], list(range(60, 66)), CUT, StoppingParams(6), logprobs=True),
    ]


@pytest.fixture(scope="module")
def undisturbed(exact):
    link, _ = serve(exact, Recorder(requests(), routed()), rows=17, prefill=64, overlap=False)
    return link


@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
def test_tokens_are_the_same_bit_by_bit_with_and_without_preemptions(exact, undisturbed, overlap):
    link = Recorder(requests(), routed())
    # Few rows, and pieces of prompts: sequences are preempted in the middle of a prompt, too.
    got, preempted = serve(exact, link, rows=9, prefill=8, overlap=overlap, preempt=0.3)
    assert preempted > 30
    assert got.tokens == undisturbed.tokens
    assert got.logprobs == undisturbed.logprobs
    assert got.tops == undisturbed.tops
    assert got.scored == undisturbed.scored != {}


def test_a_sequence_that_is_preempted_at_every_step_gets_on(exact, undisturbed):
    # With overlap each life settles one token at least: the step that was in flight.
    only = [request for request in requests() if request.sequence_ids == [2]]
    got, preempted = serve(exact, Recorder(only), rows=9, prefill=64, overlap=True, preempt=1.0)
    assert preempted >= 8
    assert got.tokens[2] == undisturbed.tokens[2]


# -- the fast operations -----------------------------------------------------------------------

#: Of scores, which temperature has divided: the models' tests' for logits.
TOLERANCE = 1e-4
ONE_IN = 10_000


def many_requests(sequences, tokens):
    chance = random.Random(2)
    return [
        Request(
            [i],
            [chance.randrange(3, 4096) for _ in range(chance.randrange(2, 12))],
            [GREEDY, SAMPLED, PENALISED][i % 3],
            StoppingParams(tokens),
            logprobs=False,
        )
        for i in range(sequences)
    ]


def scores(model, request, outputs):
    """[vocab] what the next token is the highest of: penalties, temperature and noise included."""
    known = [*request.prompt, *outputs]
    executor = HostExecutor(model, pool(len(known)), rows=1, vocab_size=VOCABULARY)
    noted = Noting(rows=1, vocab_size=VOCABULARY)
    executor._sampler = noted
    new = NewRow(request, 0, tuple(outputs))
    executor.launch(
        plan_of(1, [PlanRow(0, 0, range(len(known)), known, output=len(outputs), new=new)])
    ).wait()
    return noted.scores


class Noting(HostSampler):
    """A sampler that keeps the scores of the last token that it chose."""

    def sample(self, logits, rows, positions, masks=None):
        scores = logits
        for _, some in self._groups(rows, self.columns[rows], positions):  # none or one
            scores = self._processed(logits, some)
            if some.columns["flags"][0] & DRAWS:
                noise = vocabulary_noise(*counters(some), VOCABULARY)
                scores = tempered(scores, some) - noise.log()
        self.scores = scores[0]
        return super().sample(logits, rows, positions, masks)


@pytest.mark.parametrize(
    ("sequences", "tokens"), [(16, 40), pytest.param(101, 100, marks=pytest.mark.slow)]
)
def test_fast_operations_choose_another_token_only_where_rounding_decides(fast, sequences, tokens):
    asked, slots = many_requests(sequences, tokens), sequences * (tokens + 16)
    shape = {"rows": min(sequences, 64) + 1, "prefill": 256, "slots": slots}
    before, _ = serve(fast, Recorder(asked), overlap=False, **shape)
    after, preempted = serve(fast, Recorder(asked), overlap=True, preempt=0.01, **shape)
    assert preempted > sequences // 8
    total, others = 0, 0
    for sequence, request in after.requests.items():
        ours, theirs = before.tokens[sequence], after.tokens[sequence]
        same = next((i for i in range(tokens) if ours[i] != theirs[i]), tokens)
        total += same
        if same < tokens:
            found = scores(fast, request, ours[:same])
            assert abs(found[ours[same]] - found[theirs[same]]) < TOLERANCE
            others += 1
        # At one more place of each: these are the scores that tokens are chosen by.
        at = sequence % (same or 1)
        found = scores(fast, request, ours[:at])
        assert found.max() - found[ours[at]] < TOLERANCE
    assert total > sequences * tokens // 2
    assert others <= max(total // ONE_IN, tokens < 100)


# -- ranks -------------------------------------------------------------------------------------


def test_two_ranks_preempt_as_one_does():
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cpu",
        threads=1,
        max_batch_size=6,
        max_batch_prefill_tokens=16,
        max_total_tokens=80,
    )
    asked = [
        Request([1], list(range(5, 30)), GREEDY, StoppingParams(8), logprobs=True),
        Request([2, 3], list(range(50, 61)), SAMPLED, StoppingParams(8), logprobs=True),
        Request([4], list(range(70, 73)), PENALISED, StoppingParams(8), logprobs=True),
    ]
    port = free_port()
    jobs = [
        Job(rank, [(2, port, [str(DEMO)])], asked, options, dtype="float32", preempt=0.2)
        for rank in range(2)
    ]
    leader, follower = (said[0][0] for said in ranks.run(jobs))
    alone = ranks.answer(DEMO, asked, options, dtype="float32")
    assert leader.preemptions > 5
    assert leader.preemptions == follower.preemptions
    assert leader.tokens == follower.tokens == dict(alone.tokens)
    for sequence, logprobs in alone.logprobs.items():
        assert leader.logprobs[sequence] == pytest.approx(logprobs, abs=TOLERANCE)
