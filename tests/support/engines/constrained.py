"""Constrained sequences through an engine's loop, in the test's process: the demo model."""

from __future__ import annotations

import random
import time
from collections import defaultdict

import numpy as np
import torch
from tokenizers import Tokenizer as Backend

from support.checkpoints.demo import DEMO
from support.engines import engine_link
from support.engines.planner_probe import preempt_sequence
from support.kernels.layouts import alike
from tokenpod.core.constraints import ConstraintLimits
from tokenpod.core.messages import Advance, Vocabulary
from tokenpod.core.plan import LAST
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.loop import EngineLoop
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.steps.step_times import Costs
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

CPU = torch.device("cpu")
POSITIONS, VOCABULARY = 400, 4096
TOKENIZER = Tokenizer(Backend.from_file(str(DEMO / "tokenizer.json")))
TOKENS = Vocabulary(*TOKENIZER.token_bytes())
END = TOKENIZER.backend.token_to_id("<|end|>")
#: Every token is about as likely: what a model of random weights does.
RANDOM = {"do_sample": True, "temperature": 60.0}


def ask(
    number, constraint, *, n=1, new=60, prompt=(5, 6, 7), stopping=None, reports=None, **sampling
):
    """A request of sequences `number` and up."""
    return Request(
        list(range(number, number + n)),
        list(prompt),
        SamplingParams(**({"seed": number} | sampling)),
        StoppingParams(
            **{"max_new_tokens": new, "eos_token_ids": frozenset({END})} | (stopping or {})
        ),
        constraint=constraint,
        **(reports or {}),
    )


def text_of(tokens):
    """What tokens say, without the end."""
    return b"".join(TOKENS.tokens[t] for t in tokens if t not in (END, -1)).decode(errors="replace")


class Client(engine_link.Client):
    """Its vocabulary comes first; `routed` are a router's, one step after the other."""

    def __init__(self, requests=(), routed=(), vocabulary=TOKENS):
        super().__init__(requests)
        self.inbox.insert(0, vocabulary)
        self.routed = {request.sequence_ids[0] for request in routed}
        self.left |= {i for request in routed for i in request.sequence_ids}
        if routed:
            self.inbox.append(Advance(1, list(routed), [0] * len(routed), [], waits=False))
        #: By sequence, of its tokens by their number: top tokens, log probabilities, rank.
        self.tops_at = defaultdict(dict)
        self.satisfied = {}
        self.empty_decodes = self.steps = 0
        self.load = None

    def send(self, message):
        for top in message.tops:
            sequence = message.sequence_ids[top.at]
            before = message.sequence_ids[: top.at].count(sequence)
            at = len(self.tokens[sequence]) + before
            self.tops_at[sequence][at] = top.token_ids, top.logprobs, top.rank
        super().send(message)
        self.load, self.steps = message.load, message.step
        self.satisfied |= message.satisfied
        for advanced in message.advanced:
            assert advanced.failure is None
            self.empty_decodes += advanced.op > 1 and not (message.sequence_ids or message.failures)
            if going_on := sorted(self.routed & self.left):
                self.inbox.append(Advance(advanced.op + 1, [], [], going_on, waits=True))

    def text(self, sequence):
        return text_of(self.tokens[sequence])


class Clock:
    """Nanoseconds that pass when a test says so: no pause of the machine ends a text or a wait."""

    def __init__(self):
        self.now = 1

    def __call__(self):
        return self.now


class LateMasks(Masks):
    """Masks of which some, by chance, miss the step that they are for."""

    late = 0.0
    #: Rows of the step that decode: others are queued only once their masks are there.
    decoding = frozenset()

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.chance = random.Random(1)

    def masks(self, wanted, until):
        found = super().masks(wanted, until)
        late = {row for row in self.decoding & found.keys() if self.chance.random() < self.late}
        return {row: words for row, words in found.items() if row not in late}


class LateSteps(MaskedSteps):
    """Says which rows may be late, and counts tokens that were forced."""

    jumped = 0

    def sample(self, step, launched):
        plan = step.plan
        self.jumped += sum(map(step.drafts_of, step.forced))
        firsts = plan.r_tokens.cumsum() - plan.r_tokens
        self._masks.decoding = frozenset(np.flatnonzero(plan.t_token[firsts] == LAST).tolist())
        super().sample(step, launched)

    def forwarded(self, nanoseconds):
        del nanoseconds  # what masks may take beyond a forward is a test's to say


class Priced:
    """An executor whose steps take as long as a test says."""

    def __init__(self, executor, clock, price):
        self._executor, self._clock, self._price = executor, clock, price

    def launch(self, plan):
        self._clock.now += self._price(plan)
        return self._executor.launch(plan)


def wait_for_compiling(loop):
    """After a turn: let what was asked for be compiled, so that all of it begins together."""
    while not all(job.done for job in loop.masked._masks._compiler._jobs):
        time.sleep(0.001)


def serve(
    model,
    client,
    *,
    overlap=False,
    late=0.0,
    preempt=0.0,
    rows=9,
    slots=1200,
    prefill=16,
    library=Guidance,
    limits=None,
    each_turn=lambda loop: None,
    forced=8,
    drafting=None,
    executor=None,
    clock=None,
    price=None,
    trials=False,
    sharing=True,
):
    """Answer a client's requests; by chance masks are late, and sequences preempted.

    `client.jumped` is then how many tokens were sampled behind others because they were forced.
    With a `price`, a plan's nanoseconds, they are so only where that is thought to pay.
    """
    kv = KVPool(slots=slots, layouts=[alike(2, 64)] * 8, dtype=torch.float32, device=CPU)
    executor = executor or CpuExecutor(model, kv, rows=rows, vocab_size=VOCABULARY)
    resources = Limits(slots - 16, rows - 1, POSITIONS, prefill, forced=forced, sharing=sharing)
    costs = Costs() if price else None
    scheduler = Scheduler(resources, drafting=drafting, forced_costs=costs)
    clock = clock or Clock()
    masks = LateMasks(
        library, VOCABULARY, limits or ConstraintLimits(workers=1), clock, trials=trials
    )
    masks.late = late
    # Wait for every mask but those that are late on purpose: 100 s beyond a forward.
    masked = LateSteps(masks, overlap=overlap, clock=clock)
    masked._usual_ns = 1e12
    loop = EngineLoop(client, scheduler, executor, overlap=overlap, masked=masked)
    if price:
        loop.clock = Clock()
        loop.executor = Priced(executor, loop.clock, price)
    chance, preempted = random.Random(3), 0
    while client.left:
        for sequence in sorted(client.left):
            if chance.random() < preempt:
                preempted += preempt_sequence(scheduler, sequence)
        loop.turn()
        each_turn(loop)
        scheduler.check()
    loop.turn()
    loop.turn()
    scheduler.check()
    assert not scheduler.busy
    assert not masks._texts, "texts that nobody forgot"
    client.jumped = masked.jumped
    return client
