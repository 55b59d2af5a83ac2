"""Beams share slots by reference, and never need more than admission has counted."""

from __future__ import annotations

import random
import zlib
from itertools import accumulate

import pytest

from support.engines.planner_probe import Stalls, preempt_sequence
from support.engines.scheduler_driver import works_of
from tokenpod.core.outputs import FailureCode, FinishCode
from tokenpod.core.plan import LAST
from tokenpod.core.requests import BeamParams, EarlyStop, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.policies.exact import Exact
from tokenpod.scheduler.policies.optimistic import Optimistic
from tokenpod.scheduler.policies.past_future import PastFuture
from tokenpod.scheduler.policies.reserve import Reserve
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.sequences.beam_search import BeamSearch

VOCABULARY = 60


def search(first_id, prompt, width, new_tokens, *, n=1, ends=(), early=EarlyStop.FALSE):
    return Request(
        [*range(first_id, first_id + width)],
        prompt,
        SamplingParams(),
        StoppingParams(new_tokens, eos_token_ids=frozenset(ends)),
        top_n_tokens=width + len(ends),
        beam=BeamParams(width, 1.0, early, n),
    )


def plain(sequence_id, prompt, new_tokens):
    return Request([sequence_id], prompt, SamplingParams(), StoppingParams(new_tokens))


def marks(tokens):
    """A fingerprint of each prefix, from one token on."""
    return [*accumulate((token.to_bytes(4) for token in tokens), crc_on, initial=0)][1:]


def crc_on(before, data):
    return zlib.crc32(data, before)


class Walk:
    """A scheduler over an executor that writes fingerprints of prefixes to slots.

    With `overlap`, each step is settled after the next one is planned.
    """

    def __init__(self, *, overlap=False, seed=1, admission=Exact, **limits):
        limits = {
            "slots": 4000,
            "max_rows": 40,
            "prefill_tokens": 16,
            "max_positions": 4000,
        } | limits
        self.scheduler = Scheduler(Limits(**limits), admission=admission)
        self.stalls = Stalls(self.scheduler)
        self.overlap = overlap
        self.preempts = admission in (Optimistic, PastFuture)
        self.chance = random.Random(seed)
        self.memory: dict[int, int] = {}
        #: By row: tokens, and their slots as far as they are computed.
        self.rows: dict[int, tuple[list[int], list[int]]] = {}
        self.ended: dict[int, FinishCode] = {}
        self.failed: dict[int, FailureCode] = {}
        self.tokens: dict[int, list[int]] = {}
        self.most_used = 0
        self.bad = False
        self._flying = None

    def turn(self):
        """One turn of the loop; whether a step was under way."""
        step = self.scheduler.plan(0)
        flying, self._flying = self._flying, None
        if step is not None:
            self._flying = step, *self._run(step)
        for each in [flying] if self.overlap else [flying, self._flying]:
            if each is not None:
                self._hear(self.scheduler.settle(each[0], each[1], 0, each[2]))
        if not self.overlap:
            self._flying = None
        self._hear(self.scheduler.drain_events())
        self.scheduler.check()
        assert self.stalls.count == 0 or self.preempts
        kv = self.scheduler.kv
        self.most_used = max(self.most_used, kv.total - kv.available)
        return step is not None or flying is not None

    def run(self):
        while self.turn():
            pass
        assert not self.scheduler.busy
        assert self.scheduler.kv.available == self.scheduler.kv.total

    def _run(self, step):
        plan, at = step.plan, 0
        for row in plan.freed.tolist():
            del self.rows[row]
        for row, n, ask in zip(plan.n_row.tolist(), plan.n_prefix.tolist(), plan.asks, strict=True):
            slots = plan.prefix_slot[at : at + n].tolist()
            self.rows[row] = [*ask.request.prompt, *ask.outputs], slots
            at += n
        sampled, tops = [], {}
        for work in works_of(step):
            tokens, slots = self.rows[work.row]
            assert work.start == len(slots)
            beam = work.sequence.group is not None
            if beam and work.start >= len(work.sequence.request.prompt):
                # Named by the plan, since it was chosen among all beams.
                tokens[work.start :] = work.tokens
                known = [*work.sequence.request.prompt, *work.sequence.outputs]
                assert tokens == known[: work.start + 1]
            elif work.tokens != [LAST]:
                assert tokens[work.start : work.start + work.n_tokens] == work.tokens
            assert not {*work.slots} & {*slots}
            slots += work.slots
            found = marks(tokens[: len(slots)])
            self.memory |= dict(zip(work.slots, found[work.start :], strict=True))
            assert [self.memory[slot] for slot in slots] == found, "slots with another prefix"
            if work.samples:
                ids = self.chance.sample(range(VOCABULARY), 20)
                values = sorted((-self.chance.expovariate(0.5) for _ in ids), reverse=True)
                if beam and not self.bad:
                    tops[len(sampled)] = ids, values
                sampled.append(ids[0])
                if not beam:
                    tokens.append(ids[0])
        return sampled, tops

    def _hear(self, settled):
        for at, sequence in enumerate(settled.sequence_ids):
            assert sequence not in self.ended
            self.tokens.setdefault(sequence, []).append(settled.token_ids[at])
            if settled.finishes[at]:
                self.ended[sequence] = settled.finishes[at]
        for failure in settled.failures:
            self.failed[failure.sequence_id] = failure.code


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("admission", [Exact, Reserve, Optimistic, PastFuture])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(5, "slow")
def test_slots_hold_what_their_beams_computed_through_forks_and_ends(seed, admission, overlap):
    walk = Walk(overlap=overlap, seed=seed, admission=admission, slots=140, max_rows=14)
    chance, asked, aborted = random.Random(seed), [], set()
    for at in range(24):
        prompt = [at % 3] * chance.randrange(1, 40)
        first = 100 * at
        if at % 3:
            width = chance.randrange(2, 7)
            stop = chance.choice([*EarlyStop])
            request = search(
                first, prompt, width, chance.randrange(1, 14), n=width, ends=(1, 2), early=stop
            )
        else:
            request = plain(first, prompt, chance.randrange(1, 20))
        walk.scheduler.submit(request)
        asked.append(request)
        for _ in range(chance.randrange(6)):
            walk.turn()
        if chance.random() < 0.5:
            gone = chance.choice(asked[-3:])
            aborted |= {i for i in gone.reported if i not in walk.ended}
            walk.scheduler.abort(gone.reported)
    walk.run()
    assert not walk.failed
    told = {i for request in asked for i in request.reported}
    assert {*walk.ended} == told - aborted
    assert aborted


@pytest.mark.parametrize("overlap", [False, True])
def test_eight_beams_over_a_long_prompt_take_little_more_than_it(overlap):
    prompt, tail = 2000, 25
    walk = Walk(overlap=overlap, slots=3000, prefill_tokens=512)
    walk.scheduler.submit(search(10, [*range(prompt)], 8, tail, n=8))
    walk.run()
    assert len(walk.tokens[10]) == tail
    assert prompt < walk.most_used <= 1.1 * prompt + 8 * tail


def test_eight_samples_over_a_long_prompt_take_little_more_than_it():
    prompt, tail = 2000, 25
    walk = Walk(slots=3000, prefill_tokens=512)
    walk.scheduler.submit(
        Request([*range(8)], [*range(prompt)], SamplingParams(), StoppingParams(tail))
    )
    walk.run()
    assert prompt < walk.most_used <= 1.1 * prompt + 8 * tail


def test_as_many_searches_run_at_once_as_their_bounds_allow():
    # Three of 20 + 4 * 10 tokens do not fit into 150 slots at once.
    walk = Walk(slots=150, prefill_tokens=64)
    for at in range(3):
        walk.scheduler.submit(search(10 * at, [at] * 20, 4, 10))
    most = 0
    while walk.turn():
        most = max(most, walk.scheduler.load().running)
    assert most == 8
    assert {*walk.ended} == {0, 10, 20}


def test_a_search_is_not_preempted():
    walk = Walk()
    walk.scheduler.submit(search(10, [1, 2, 3], 3, 6))
    while not walk.ended:
        walk.turn()
        assert not any(preempt_sequence(walk.scheduler, i) for i in (10, 11, 12))


def test_nan_ends_a_search_as_a_whole():
    walk = Walk()
    walk.scheduler.submit(search(10, [1, 2, 3], 3, 9, n=2))
    for _ in range(3):
        walk.turn()
    walk.bad = True
    walk.run()
    assert walk.failed == {10: FailureCode.DATA_LOSS, 11: FailureCode.DATA_LOSS}


IMPOSSIBLE = {
    "a search needs 5 most likely tokens of each beam, not 4": {"top_n_tokens": 4},
    "3 sequences and 4 results of 3 beams": {"beam": BeamParams(3, n=4)},
    "3 sequences and 1 results of 2 beams": {"beam": BeamParams(2)},
}


@pytest.mark.parametrize("problem", IMPOSSIBLE)
def test_an_impossible_search_is_refused(problem):
    walk = Walk()
    made = {"sequence_ids": [1, 2, 3], "prompt": [1], "sampling": SamplingParams()}
    made |= {"stopping": StoppingParams(2, eos_token_ids=frozenset({1, 2})), "top_n_tokens": 5}
    walk.scheduler.submit(Request(**made | {"beam": BeamParams(3)} | IMPOSSIBLE[problem]))
    (failure, *_) = walk.scheduler.drain_events().failures
    assert failure.message == problem


def test_rows_with_states_of_their_own_do_not_search():
    walk = Walk(sharing=False)
    walk.scheduler.submit(search(1, [1], 2, 4))
    assert "beam search" in walk.scheduler.drain_events().failures[0].message


# -- the rules, by hand ------------------------------------------------------------------------


def test_a_beam_that_ends_makes_room_for_the_next_best():
    rules = BeamSearch(BeamParams(2, 1.0), StoppingParams(9, eos_token_ids=frozenset({0})))
    assert rules.step([([0, 1, 2], [-0.1, -0.5, -0.9])], 0) == [0, 0]
    assert [beam.tokens for beam in rules.beams] == [[1], [2]]
    assert [result.beam.tokens for result in rules.results] == [[0]]
    # From here on both continue the first beam: the second's best is worse than its second best.
    assert rules.step([([3, 4, 5], [-0.1, -0.2, -9]), ([6, 7, 8], [-1, -2, -3])], 0) == [0, 0]


def test_an_end_below_the_first_places_is_no_result():
    rules = BeamSearch(BeamParams(2, 1.0), StoppingParams(9, eos_token_ids=frozenset({0})))
    rules.step([([1, 2, 0], [-0.1, -0.2, -0.3])], 0)
    assert not rules.results
