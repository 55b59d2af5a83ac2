"""Preempted sequences: what they lose, where they wait, and that their tokens stay the same."""

import random

import pytest

from support.engines.scheduler_driver import Driver, request


@pytest.fixture(params=[False, True], ids=["settled at once", "overlapped"])
def overlap(request):
    return request.param


def driver_with(overlap=False, **limits):
    def choose(sequence_id, index):
        return 1 + (sequence_id * 31 + index * 7) % 5

    limits = {"slots": 200, "max_rows": 8, "prefill_tokens": 8} | limits
    return Driver(overlap=overlap, choose=choose, **limits)


def test_a_preempted_sequence_frees_its_slots_and_is_computed_again(overlap):
    driver = driver_with(overlap, prefix_caching=False)
    driver.submit(request(1, [9] * 6, max_new_tokens=10))
    for _ in range(4):
        driver.turn()
    assert driver.preempt(1) == [1]
    driver.turn()
    had = len(driver.outputs(1))
    while not driver.planned():
        driver.turn()
    # Prompt and outputs, and in the next step what is left of them beyond the budget.
    assert driver.planned() == {1: 8}
    driver.turn()
    assert driver.planned() == {1: 6 + had - 8}
    driver.drain()
    assert len(driver.outputs(1)) == 10


def test_what_it_computed_is_found_in_the_cache():
    driver = driver_with()
    driver.submit(request(1, [9] * 6, max_new_tokens=10))
    for _ in range(4):
        driver.turn()
    driver.preempt(1)
    driver.turn()
    assert driver.planned() == {1: 1}
    assert driver.scheduler.load().preemptions == 1
    driver.drain()


def test_it_keeps_its_place_in_the_queue(overlap):
    driver = driver_with(overlap, max_rows=2)
    for i in range(1, 6):
        driver.submit(request(i, [i] * 4, max_new_tokens=20, priority=int(i == 5)))
    for _ in range(4):
        driver.turn()
    assert set(driver.planned()) == {5, 1}
    assert driver.preempt(1, 5) == [1, 5]
    for _ in range(3):
        driver.turn()
    assert set(driver.planned()) == {5, 1}
    driver.drain()


def test_samples_that_wait_for_a_prompt_go_back_with_it(overlap):
    driver = driver_with(overlap)
    driver.submit(request([1, 2, 3], [9] * 20, max_new_tokens=6))
    driver.turn()
    assert driver.preempt(1, 2, 3) == [1]
    driver.run()
    assert [len(driver.outputs(i)) for i in (1, 2, 3)] == [6, 6, 6]
    driver.drain()


def test_samples_of_one_request_can_all_wait_again(overlap):
    driver = driver_with(overlap)
    driver.submit(request([1, 2, 3], [9] * 6, max_new_tokens=8))
    for _ in range(6):
        driver.turn()
    assert driver.preempt(1, 2, 3) == [1, 2, 3]
    driver.drain()
    assert [len(driver.outputs(i)) for i in (1, 2, 3)] == [8, 8, 8]


def test_one_with_a_step_in_flight_keeps_the_token_of_that_step():
    driver = driver_with(overlap=True)
    driver.submit(request(1, [9] * 4, max_new_tokens=3))
    driver.turn()
    driver.turn()
    # The prompt's token is known, and one is under way.
    assert len(driver.outputs(1)) == 1
    driver.preempt(1)
    assert driver.scheduler.load().running == 1
    driver.turn()
    assert len(driver.outputs(1)) == 2
    driver.drain()


def test_one_that_ends_or_is_aborted_with_its_step_in_flight_does_not_come_back():
    driver = driver_with(overlap=True)
    driver.submit(request(1, [9] * 4, max_new_tokens=2))
    driver.submit(request(2, [8] * 3, max_new_tokens=9))
    driver.turn()
    driver.turn()
    assert driver.preempt(1, 2) == [1, 2]
    driver.abort(2)
    driver.turn()
    assert driver.sequences[1].ended == "finish"
    assert driver.turn() is False
    driver.drain()


def test_only_running_sequences_of_the_batcher_can_be_preempted(overlap):
    driver = driver_with(overlap, max_rows=2)
    driver.advance(1, [request(1, [1] * 3)])
    driver.submit(request(2, [2] * 3, max_new_tokens=9))
    driver.submit(request(3, [3] * 3))
    driver.submit(request(4, [4] * 3, max_new_tokens=1, probe=True))
    driver.turn()
    assert driver.preempt(1, 3, 4, 5) == []
    assert driver.preempt(2, 2) == [2]
    driver.drain()


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("seed", range(12))
def test_the_same_tokens_with_and_without_preemptions(seed):
    chance = random.Random(seed)
    texts = [[1] * 30, [1, 2] * 15, [2, 2, 1] * 10]
    asked, held, ids = [], [], 0
    for _ in range(12):
        n = chance.choice([1, 1, 2, 3])
        ids += n
        prompt = chance.choice(texts)[: chance.randint(1, 20)]
        stops = frozenset(chance.choice([(), (4,), (2, 3)]))
        asked.append(
            request(
                range(ids - n + 1, ids + 1),
                prompt,
                max_new_tokens=chance.randint(1, 12),
                min_new_tokens=chance.choice([0, 2]),
                stop_token_ids=stops,
                prompt_logprobs=chance.random() < 0.2,
                priority=chance.randint(0, 1),
            )
        )
    for _ in range(2):
        ids += 1
        held.append(request(ids, chance.choice(texts)[: chance.randint(1, 12)], max_new_tokens=7))
    found = []
    for share in (0.0, chance.choice([0.1, 0.3])):
        driver = driver_with(
            overlap=chance.random() < 0.5,
            slots=chance.randint(70, 150),
            max_rows=chance.randint(3, 9),
            prefill_tokens=chance.choice([4, 30]),
            prefix_caching=chance.random() < 0.7,
        )
        found.append(lived(driver, asked, held, share, chance))
    assert found[0] == found[1]


def lived(driver, asked, held, share, chance):
    """The tokens of all sequences, each preempted before a turn by a chance of `share`."""
    for each in asked:
        driver.submit(each)
    assert driver.advance(1, held, waits=True) is None
    preempted = op = 0
    ids = [i for each in asked for i in each.sequence_ids]
    for turn in range(2000):
        preempted += len(driver.preempt(*(i for i in ids if chance.random() < share)))
        going = [i for i, s in driver.sequences.items() if s.held and not s.ended]
        if going and len(driver.ops) == len(driver.ops_done):
            op = 100 + turn
            driver.advance(op, resume=going, waits=True)
        driver.turn()
        if all(s.ended for s in driver.sequences.values()):
            break
    assert share == 0 or preempted > 0
    tokens = {i: driver.outputs(i) for i in driver.sequences}
    driver.drain()
    return tokens
