"""Policies are modules of their own, which go through the same batcher and queue."""

import random
from typing import get_args

import pytest

from support.engines.scheduler_driver import Driver, request
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.policies.batching import Joining, Portion
from tokenpod.scheduler.policies.by_name import ADMISSIONS, BATCHINGS
from tokenpod.scheduler.policies.optimistic import Optimistic
from tokenpod.service.config.settings import Settings


class InTurns:
    """Two requests or more join, or none; then their prompts are computed, and nothing else."""

    def __init__(self, limits):
        self.quantum = self._budget = limits.prefill_tokens

    def joining(self, running, waiting):
        total, most = 0, 0
        for tokens in waiting:
            total += tokens
            if total > self._budget:
                break
            most += 1
        return Joining(least=2 if running else 1, most=most)

    def portion(self, *, prompts, prompt_tokens):
        return Portion(decode=not prompts, prompt_tokens=self._budget)

    def decoded(self):
        pass


def preempting(overlap, **limits):
    limits = {"slots": 60, "max_rows": 8, "prefill_tokens": 30} | limits
    return Driver(
        overlap=overlap,
        choose=lambda sequence_id, index: 1 + (sequence_id * 31 + index * 7) % 5,
        admission=Optimistic,
        **limits,
    )


@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
def test_who_came_last_gives_way_when_slots_run_out(overlap):
    driver = preempting(overlap)
    for i in (1, 2, 3):
        driver.submit(request(i, [i] * 10, max_new_tokens=25))
    driver.turn()
    # Exact admission would have let two in at most.
    assert len(driver.planned()) == 3
    driver.run()
    assert driver.scheduler.load().preemptions > 0
    assert [len(driver.outputs(i)) for i in (1, 2, 3)] == [25, 25, 25]
    driver.drain()


def test_the_first_one_never_waits_for_those_that_came_later():
    driver = preempting(False)
    for i in range(1, 6):
        driver.submit(request(i, [i] * 8, max_new_tokens=30))
    while not driver.sequences[1].ended:
        driver.turn()
        assert 1 in driver.planned()
    driver.drain()


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("seed", range(8))
def test_memory_that_runs_out_changes_no_token_and_leaves_routers_theirs(seed):
    chance = random.Random(seed)
    driver = preempting(seed % 2 == 1, slots=chance.randint(60, 90), prefill_tokens=8)
    expected, ids, op = {}, 0, 0
    for _ in range(150):
        if chance.random() < 0.3:
            n = chance.choice([1, 1, 1, 2])
            ids += n
            these = range(ids - n + 1, ids + 1)
            new = chance.randint(4, 24)
            prompt = [chance.randint(1, 2)] * chance.randint(1, 12)
            driver.submit(request(these, prompt, max_new_tokens=new))
            expected |= dict.fromkeys(these, new)
        if chance.random() < 0.1:
            ids, op = ids + 1, op + 1
            driver.advance(op, [request(ids, [3] * 4, max_new_tokens=6)])
        held = [i for i, s in driver.sequences.items() if s.held and not s.ended]
        if held and chance.random() < 0.3:
            op += 1
            driver.advance(op, resume=held)
        if chance.random() < 0.05:
            driver.submit(request(10_000 + op, [4] * 9, max_new_tokens=1, probe=True))
            op += 1
        driver.turn()
    driver.run()
    driver.abort(*[i for i, s in driver.sequences.items() if s.held])
    driver.run()
    for sequence_id, new in expected.items():
        chosen = [1 + (sequence_id * 31 + index * 7) % 5 for index in range(new)]
        assert driver.outputs(sequence_id) == chosen
    assert driver.scheduler.load().preemptions > 0
    driver.drain()


def test_requests_join_in_batches_and_prompts_are_computed_by_themselves():
    driver = Driver(slots=300, max_rows=8, prefill_tokens=20, batching=InTurns)
    driver.submit(request(1, [1] * 6, max_new_tokens=12))
    driver.turn()
    driver.turn()
    driver.submit(request(2, [2] * 6))
    driver.turn()
    # Alone it does not join, and the running stream goes on.
    assert driver.planned() == {1: 1}
    for i, length in ((3, 9), (4, 5), (5, 4)):
        driver.submit(request(i, [i] * length))
    driver.turn()
    # Three fit into the prompts' budget. No token is decoded beside them.
    assert driver.planned() == {2: 6, 3: 9, 4: 5}
    driver.turn()
    assert driver.planned() == {1: 1, 2: 1, 3: 1, 4: 1}
    driver.drain()


@pytest.mark.parametrize(
    ("setting", "policies"),
    [("admission", ADMISSIONS), ("batching", BATCHINGS), ("preemption", PREEMPTIONS)],
)
def test_flags_name_the_policies_that_there_are(setting, policies):
    assert set(get_args(Settings.model_fields[setting].annotation)) == set(policies)
