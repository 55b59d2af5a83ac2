"""The demo model behind an engine's loop, and requests of every kind: whole but for sockets."""

from __future__ import annotations

import functools
import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from support.checkpoints.demo import DEMO
from support.engines.engine_link import Client
from support.engines.planner_probe import preempt_sequence
from support.kernels.layouts import alike
from support.steps import row_by_row
from tokenpod.core.messages import Advance
from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import PlanRow, plan_of
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import DRAWS, SamplingParams
from tokenpod.engine.cpu.cpu_draws import counters, tempered
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.cpu.cpu_sampler import CpuSampler
from tokenpod.engine.drafts.draft import SmallModel
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.sampling.rng import vocabulary_noise
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.offload_pool import OffloadPool
from tokenpod.models import load as loading
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.policies.exact import Exact
from tokenpod.scheduler.scheduler import Limits, Scheduler

CPU = torch.device("cpu")
SLOTS, POSITIONS, VOCABULARY = 1200, 400, 4096
LAYOUTS = [alike(2, 64)] * 8

GREEDY = SamplingParams()
SAMPLED = SamplingParams(do_sample=True, temperature=0.9, seed=5)
CUT = SamplingParams(do_sample=True, temperature=1.1, top_k=40, top_p=0.95, typical_p=0.9, seed=6)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
WATERMARKED = SamplingParams(
    do_sample=True, watermark=True, relative_frequency_penalty=0.5, seed=9, logit_bias={17: 2.0}
)
KINDS = [GREEDY, SAMPLED, CUT, PENALISED, WATERMARKED]


@functools.cache
def demo_model():
    """The embedded model in float32; tests leave it as it is."""
    return _load()


@functools.cache
def exact_model(layers=2):
    """Its first layers, by which what else is in a step changes no bit of a token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "operations_for", lambda device: row_by_row.OPERATIONS)
        return row_by_row.shallow(_load(), layers)


def _load():
    return loading.load_model(
        DEMO, dtype=torch.float32, device=CPU, progress=lambda done, total: None
    )


def pool(slots):
    return KVPool(slots=slots, layouts=LAYOUTS, dtype=torch.float32, device=CPU)


class Recorder(Client):
    """Beside requests, a router's steps: each follows the one before."""

    def __init__(self, requests, routed=()):
        super().__init__(requests)
        self.requests = {i: request for request in requests for i in request.sequence_ids}
        self.routed = {request.sequence_ids[0]: request for request in routed}
        self.started: list[int] = []
        self.load, self.steps = None, 0
        #: Drafted tokens and accepted ones, by sequence.
        self.drafts: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(2, int))
        if routed:
            self.inbox.append(Advance(1, list(routed), [3] * len(routed), [], waits=True))

    @property
    def done(self) -> bool:
        return self.finished == {*self.requests, *self.routed}

    @property
    def drafted(self) -> tuple[int, int]:
        """Drafted tokens and accepted ones, of all."""
        return self.load.drafted_tokens, self.load.accepted_tokens

    def send(self, message):
        super().send(message)
        assert not self.failures
        self.load, self.steps = message.load, message.step
        for draft in message.drafted:
            self.drafts[draft.sequence_id] += (draft.drafted, draft.accepted)
        self.started += [started.sequence_id for started in message.started]
        for advanced in message.advanced:
            assert advanced.failure is None
            going_on = sorted(self.routed.keys() - self.finishes.keys())
            if going_on:
                self.inbox.append(Advance(advanced.op + 1, [], [], going_on, waits=True))


def serve(
    model,
    link,
    *,
    rows,
    prefill,
    overlap,
    preempt=0.0,
    slots=SLOTS,
    drafting=None,
    admission=Exact,
    draft=None,
    offload_slots=0,
):
    """Answer a recorder's requests; before each turn every sequence is preempted by chance.

    The admission policy may preempt more. `draft`: a draft model of the same shape. With
    `offload_slots` what is preempted is swapped, and the pool forgets at once what only the cache
    holds.
    """
    own = draft and SmallModel(draft, pool(slots), VOCABULARY, VOCABULARY, most=8)
    kept, made = pool(slots), None
    if offload_slots:
        slot_bytes = (1 + bool(draft)) * KVPool.bytes_per_slot(layouts=LAYOUTS, dtype=torch.float32)
        made = OffloadPool(offload_slots, slot_bytes, pinned=False)
    executor = CpuExecutor(model, kept, rows=rows, vocab_size=VOCABULARY, draft=own, offload=made)
    limits = Limits(
        slots - 16, rows - 1, POSITIONS, prefill, offload_slots=offload_slots, offload_block=4
    )
    preemption = PREEMPTIONS["swap" if offload_slots else "recompute"](1)
    scheduler = Scheduler(limits, drafting=drafting, admission=admission, preemption=preemption)
    loop = EngineLoop(link, scheduler, executor, overlap=overlap)
    chance, preempted = random.Random(3), 0
    for _ in range(5000):
        if link.done:
            break
        for sequence in [*link.requests, *link.routed]:
            if chance.random() < preempt:
                preempted += preempt_sequence(scheduler, sequence)
        if offload_slots:
            scheduler.kv.evict(scheduler.kv.tree.tokens)
        loop.turn()
    assert link.done
    assert link.load.preemptions == preempted or admission is not Exact
    assert not loop._scored
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
    layouts = model.config.kv_layouts
    own = KVPool(slots=len(known), layouts=layouts, dtype=torch.float32, device=CPU)
    executor = CpuExecutor(model, own, rows=1, vocab_size=VOCABULARY)
    noted = Noting(rows=1, vocab_size=VOCABULARY)
    executor._sampler = noted
    new = NewRow(request, 0, tuple(outputs))
    executor.launch(
        plan_of(1, [PlanRow(0, 0, range(len(known)), known, output=len(outputs), new=new)])
    ).wait()
    return noted.scores


class Noting(CpuSampler):
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
