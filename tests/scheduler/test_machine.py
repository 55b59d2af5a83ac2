"""Random lives of a scheduler, against a reference that knows what every slot must hold."""

from __future__ import annotations

import random
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from support.engines.scheduler_driver import Driver, Guesses, request
from support.examples import ALL
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.policies.by_name import ADMISSIONS, batching
from tokenpod.scheduler.sequences.work import SnapshotLimits

#: Prompts are cut from few texts, so that many begin alike.
TEXTS = [[1] * 60, [1, 2] * 30, [2, 2, 1] * 20, [1] * 10 + [2] * 50]
EOS, STOP = 8, 9


@st.composite
def prompts(draw):
    text = draw(st.sampled_from(TEXTS))
    tail = draw(st.lists(st.integers(1, 3), max_size=3))
    return text[: draw(st.integers(1, 40))] + tail


@st.composite
def stops(draw):
    return {
        "max_new_tokens": draw(st.integers(1, 16)),
        "min_new_tokens": draw(st.integers(0, 3)),
        "eos_token_ids": draw(st.sampled_from([frozenset(), frozenset({EOS})])),
        "stop_token_ids": draw(st.sampled_from([frozenset(), frozenset({STOP})])),
        "length_first": draw(st.booleans()),
    }


def virtual(adapter):
    """Of adapters 4 and 5: embeddings of virtual tokens, and their keys and values."""
    return {4: {"virtual_tokens": 3}, 5: {"virtual_tokens": 5, "virtual_kv": True}}.get(adapter, {})


class SchedulerLife(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1 << 30),
        slots=st.integers(20, 200),
        rows=st.integers(1, 12),
        prefill=st.integers(2, 40),
        overlap=st.booleans(),
        nan=st.sampled_from([0.0, 0.0, 0.03]),
        end=st.sampled_from([0.0, 0.1]),
        caching=st.sampled_from([True, True, False]),
        admission=st.sampled_from(["exact", "exact", *ADMISSIONS]),
        alternate=st.sampled_from([False, False, True]),
        drafts=st.sampled_from([0, 0, 1, 3]),
        # How many snapshots, and tokens between them; rows have states, but for 0.
        snapshots=st.sampled_from([0, 0, 1, 4, 20]),
        least=st.sampled_from([1, 2, 5]),
        stride=st.sampled_from([2, 8, 100]),
    )
    def begin(
        self,
        seed,
        slots,
        rows,
        prefill,
        overlap,
        nan,
        end,
        caching,
        admission,
        alternate,
        drafts,
        snapshots,
        least,
        stride,
    ):
        chance = random.Random(seed)

        def choose(sequence_id, index):
            draw = chance.random()
            if draw < nan:
                return -1
            return chance.choice((EOS, STOP)) if draw < nan + end else chance.randint(1, 2)

        self.states = snapshots > 0
        drafts = 0 if self.states else drafts
        self.driver = Driver(
            sharing=not self.states,
            snapshots=SnapshotLimits(snapshots, rows + 1, least, stride, 3) if snapshots else None,
            overlap=overlap,
            choose=choose,
            slots=slots,
            max_rows=rows,
            max_positions=52,
            prefill_tokens=prefill,
            prefix_caching=caching,
            adapter_slots=2,
            adapters=frozenset(range(1, 6)),
            admission=ADMISSIONS[admission],
            batching=batching("alternate" if alternate else "mixed", max_waiting_tokens=4),
            **({"drafting": partial(Drafting, Guesses(seed), drafts)} if drafts else {}),
        )
        self.drafts = drafts
        self.ids = 0

    def new_ids(self, n):
        self.ids += n
        return list(range(self.ids - n + 1, self.ids + 1))

    @rule(
        prompt=prompts(),
        stops=stops(),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "tenant"]),
        adapter=st.sampled_from([0, 0, 1, 2, 3, 4, 5]),
        score=st.sampled_from([False, False, False, True]),
        deadline=st.none() | st.integers(1, 60),
        limit=st.none() | st.integers(1, 60),
        turns=st.integers(0, 5),
    )
    def submit(self, prompt, stops, n, priority, salt, adapter, score, deadline, limit, turns):
        now = self.driver.now
        adapter = self.fitting(adapter)
        self.driver.submit(
            request(
                self.new_ids(n),
                prompt,
                **stops,
                priority=priority,
                salt=f"{salt} {adapter}" if adapter else salt,
                adapter=adapter,
                **virtual(adapter),
                prompt_logprobs=score,
                drafts=self.drafts,
                deadline_at=None if deadline is None else now + deadline,
                time_limit_at=None if limit is None else now + limit,
            )
        )
        self.turns(turns)

    @rule(
        prompt=prompts(),
        new=st.integers(1, 16),
        samples=st.lists(st.integers(1, 3), min_size=2, max_size=8),
        turns=st.integers(0, 3),
    )
    def submit_the_same_at_once(self, prompt, new, samples, turns):
        for n in samples:
            self.driver.submit(
                request(self.new_ids(n), prompt, max_new_tokens=new, drafts=self.drafts)
            )
        self.turns(turns)

    @rule(turns=st.integers(1, 20))
    def turns(self, turns):
        for _ in range(turns):
            self.driver.now += 1
            self.driver.turn()

    @rule(pick=st.randoms(use_true_random=False), n=st.integers(1, 3))
    def abort(self, pick, n):
        alive = self.alive()
        self.driver.abort(*pick.sample(alive, min(n, len(alive))))

    @rule(pick=st.randoms(use_true_random=False), n=st.integers(1, 4), turns=st.integers(0, 3))
    def preempt(self, pick, n, turns):
        alive = self.alive()
        self.driver.preempt(*pick.sample(alive, min(n, len(alive))))
        self.turns(turns)

    @rule(
        starts=st.lists(
            st.tuples(prompts(), stops(), st.integers(0, 12), st.sampled_from([0, 0, 0, 1, 4, 5])),
            max_size=3,
        ),
        pick=st.randoms(use_true_random=False),
        waits=st.booleans(),
        turns=st.integers(0, 6),
    )
    def advance(self, starts, pick, waits, turns):
        held = self.alive(held=True)
        self.driver.advance(
            1000 + len(self.driver.ops),
            [
                request(
                    self.new_ids(1),
                    prompt,
                    **stops,
                    drafts=self.drafts,
                    adapter=adapter,
                    salt=str(adapter) if adapter else "",
                    **virtual(adapter),
                )
                for prompt, stops, _, adapter in (
                    (*start[:3], self.fitting(start[3])) for start in starts
                )
            ],
            [end for _, _, end, _ in starts],
            pick.sample(held, pick.randint(0, len(held))),
            waits=waits,
        )
        self.turns(turns)

    @rule(prompt=prompts(), n=st.integers(1, 3), turns=st.integers(0, 3))
    def probe(self, prompt, n, turns):
        for _ in range(n):
            self.driver.submit(request(self.new_ids(1), prompt[:10], max_new_tokens=1, probe=True))
        self.turns(turns)

    @rule(rounds=st.integers(1, 16))
    def decode_all_that_is_held(self, rounds):
        for _ in range(rounds):
            self.driver.advance(1000 + len(self.driver.ops), resume=self.alive(held=True))
            self.turns(2)

    def fitting(self, adapter):
        """No row begins behind keys and values without a state."""
        return 4 if self.states and adapter == 5 else adapter

    def alive(self, held=False):
        sequences = self.driver.sequences.items()
        return [i for i, s in sequences if not s.ended and (s.held or not held)]

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(
    max_examples=30 if ALL else 15,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
