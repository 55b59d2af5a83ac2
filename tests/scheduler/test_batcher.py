import numpy as np
import pytest

from support.engines.scheduler_driver import Driver, request
from tokenpod.core.plan import GIVEN
from tokenpod.core.requests import GivenVectors


@pytest.fixture(params=[False, True], ids=["settled at once", "overlapped"])
def driver(request):
    driver = Driver(overlap=request.param, slots=200, max_rows=8, prefill_tokens=8)
    yield driver
    driver.drain()


def test_requests_run_in_the_order_of_arrival(driver):
    for sequence_id in (1, 2, 3):
        driver.submit(request(sequence_id, [sequence_id] * 8))
    started = []
    for _ in range(3):
        driver.turn()
        started += [i for i, n in driver.planned().items() if n > 1]
    assert started == [1, 2, 3]


def test_a_higher_priority_goes_first(driver):
    driver.submit(request(1, [1] * 8))
    driver.submit(request(2, [2] * 8, priority=1))
    driver.turn()
    assert driver.planned() == {2: 8}


def test_a_running_stream_gets_its_token_in_every_step_while_prompts_are_computed(driver):
    driver.submit(request(1, [1] * 4, max_new_tokens=10))
    driver.turn()
    driver.submit(request(2, [2] * 40))
    for _ in range(5):
        driver.turn()
        assert driver.planned() == {1: 1, 2: 8}


def test_the_longest_sequences_come_first_in_a_step(driver):
    for sequence_id, length in ((1, 2), (2, 8), (3, 5), (4, 7)):
        driver.submit(request(sequence_id, [sequence_id] * length, max_new_tokens=10))
    driver.turn()
    while any(n > 1 for n in driver.planned().values()):
        driver.turn()
    driver.turn()
    assert list(driver.planned()) == [2, 4, 3, 1]


def test_the_prompt_budget_is_filled_from_several_prompts(driver):
    for sequence_id in (1, 2, 3):
        driver.submit(request(sequence_id, [sequence_id] * 3))
    driver.turn()
    assert driver.planned() == {1: 3, 2: 3, 3: 2}


def seeing(first: int, count: int) -> GivenVectors:
    """An image whose tokens see each other; the first one has the ids of `SEEN`."""
    return GivenVectors(first, np.zeros((count, 1), np.float32), key=b"an image", mutual=True)


SEEN = [GIVEN - i for i in range(30)]


def test_tokens_that_see_each_other_are_in_one_step():
    """Before and behind it a piece ends; beside streams it may be longer than others are."""
    driver = Driver(slots=200, max_rows=8, prefill_tokens=8, mutual=8)
    driver.submit(request(1, [1] * 5 + SEEN[:7] + [1] * 10, given=[seeing(5, 7)]))
    driver.submit(request(2, [2] * 3))
    steps = []
    while not driver.outputs(1):
        driver.turn()
        steps.append((driver.planned(), driver.last_step.plan.r_mutual.tolist()))
    assert steps == [
        ({1: 5, 2: 3}, []),
        ({2: 1, 1: 7}, [0, 1]),
        ({2: 1, 1: 8}, []),
        ({2: 1, 1: 2}, []),
    ]
    driver.run()
    # The same image behind the same text is in the cache.
    driver.submit(request(3, [1] * 5 + SEEN[:7] + [3] * 2, given=[seeing(5, 7)]))
    driver.turn()
    assert driver.planned() == {3: 2}
    driver.drain()


@pytest.mark.parametrize(
    ("count", "problem"),
    [
        (12, "an image has 12 tokens; a step reads 8"),
        (21, "21 tokens of an image see each other; those of this model: 20"),
    ],
)
def test_an_image_that_no_step_has_room_for_is_refused(count, problem):
    driver = Driver(slots=200, max_rows=8, prefill_tokens=8, mutual=20)
    driver.scheduler.submit(request(1, [1] * 30, given=[seeing(2, count)]))
    (failure,) = driver.scheduler.drain_events().failures
    assert failure.message.startswith(problem)


def test_nobody_overtakes_the_head_of_the_queue():
    driver = Driver(slots=40, max_rows=8, prefill_tokens=40)
    driver.submit(request(1, [1] * 20, max_new_tokens=5))
    driver.turn()
    driver.submit(request(2, [2] * 20, max_new_tokens=5))
    driver.submit(request(3, [3], max_new_tokens=1))
    driver.turn()
    assert set(driver.planned()) == {1}
    driver.drain()


def test_admission_counts_on_the_end_of_the_running():
    # 20 + 10 and 20 + 10 need 60 slots if they ran side by side from the start.
    driver = Driver(slots=45, max_rows=8, prefill_tokens=40)
    driver.submit(request(1, [1] * 20, max_new_tokens=4))
    driver.submit(request(2, [2] * 10, max_new_tokens=25))
    driver.turn()
    assert set(driver.planned()) == {1, 2}
    driver.drain()


def test_rows_are_a_limit_too():
    driver = Driver(slots=400, max_rows=2, prefill_tokens=40)
    for sequence_id in (1, 2, 3):
        driver.submit(request(sequence_id, [sequence_id] * 4))
    driver.turn()
    assert set(driver.planned()) == {1, 2}
    driver.drain()


def test_samples_share_the_prompt_of_the_first(driver):
    driver.submit(request([1, 2, 3], [1] * 8))
    driver.turn()
    assert driver.planned() == {1: 8}
    driver.turn()
    if driver.overlap:
        # Planned before the prompt was settled.
        assert driver.planned() == {1: 1}
        driver.turn()
    assert driver.planned() == {1: 1, 2: 1, 3: 1}
    driver.run()
    assert driver.scheduler.kv.tree.tokens <= 8 + 3 * 4
    assert [len(driver.outputs(i)) for i in (1, 2, 3)] == [4, 4, 4]


def test_samples_outlive_the_first_when_it_is_aborted_on_the_way(driver):
    driver.submit(request([1, 2, 3], [1] * 16))
    driver.turn()
    driver.abort(1)
    driver.run()
    assert [len(driver.outputs(i)) for i in (1, 2, 3)] == [0, 4, 4]


def test_a_later_request_finds_the_prompt_and_the_answer_of_an_earlier_one(driver):
    driver.submit(request(1, [1] * 6, max_new_tokens=3))
    driver.run()
    driver.submit(request(2, [1] * 6 + driver.outputs(1) + [7] * 4))
    driver.turn()
    # The last token of the answer has never been computed.
    assert driver.planned() == {2: 5}


def test_a_prompt_whose_tokens_are_scored_is_computed_whole(driver):
    driver.submit(request(1, [1] * 6))
    driver.run()
    driver.submit(request(2, [1] * 6, prompt_logprobs=True))
    driver.turn()
    assert driver.planned() == {2: 6}


def test_a_waiting_request_is_dropped_at_its_deadline(driver):
    driver.submit(request(1, [1] * 4, deadline_at=5))
    driver.now = 5
    driver.turn()
    assert driver.planned() == {}
    assert driver.sequences[1].ended == "failure DEADLINE_EXCEEDED"


def test_a_running_stream_ends_at_its_deadline(driver):
    driver.submit(request(1, [1] * 4, max_new_tokens=50, deadline_at=5))
    for _ in range(3):
        driver.turn()
    driver.now = 5
    driver.turn()
    assert driver.planned() == {}
    assert driver.sequences[1].ended == "failure DEADLINE_EXCEEDED"


def test_a_time_limit_that_passes_in_the_queue_ends_without_a_token(driver):
    driver.submit(request(1, [1] * 4, time_limit_at=5))
    driver.now = 5
    driver.turn()
    assert driver.sequences[1].ended == "finish"
    assert driver.outputs(1) == []


def test_an_abort_frees_within_one_step(driver):
    driver.submit(request(1, [1] * 8, max_new_tokens=50))
    for _ in range(4):
        driver.turn()
    driver.abort(1)
    driver.turn()
    assert driver.scheduler.kv.available == driver.scheduler.kv.total
    assert driver.scheduler.load().running == 0


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request(1, [], max_new_tokens=1), "at least one prompt token"),
        (request(1, [1], max_new_tokens=0), "one new token"),
        (request(1, [1] * 150, max_new_tokens=60), "needs 209 tokens of KV cache; there are 200"),
        (request(range(1, 10), [1]), "9 samples; 8 sequences"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(bad, why):
    driver = Driver(slots=200, max_rows=8, prefill_tokens=8)
    driver.scheduler.submit(bad)
    failures = driver.scheduler.drain_events().failures
    assert [f.sequence_id for f in failures] == bad.sequence_ids
    assert all(why in f.message for f in failures)
    driver.drain()


def test_a_sequence_with_nan_fails_alone_and_leaves_nothing_behind():
    driver = Driver(
        slots=100, max_rows=4, prefill_tokens=50, choose=lambda i, _: -1 if i == 1 else 3
    )
    driver.submit(request(1, [1] * 5))
    driver.submit(request(2, [2] * 5))
    driver.run()
    assert driver.sequences[1].ended == "failure DATA_LOSS"
    assert len(driver.outputs(2)) == 4
    assert driver.scheduler.kv.tree.match([1] * 5)[1] == 0
    driver.drain()


@pytest.mark.parametrize("aborted", [False, True], ids=["alive", "aborted meanwhile"])
def test_nan_that_is_seen_late_still_keeps_its_values_out_of_the_cache(aborted):
    # The second token of sequence 1 comes out as NaN in a step that is in flight at the abort.
    driver = Driver(
        overlap=True,
        choose=lambda i, index: -1 if (i, index) == (1, 1) else 3,
        slots=100,
        max_rows=4,
        prefill_tokens=50,
    )
    driver.submit(request(1, [1, 2, 3, 4], max_new_tokens=8))
    driver.turn()
    driver.turn()
    assert driver.outputs(1) == [3]
    if aborted:
        driver.abort(1)
    driver.run()
    driver.submit(request(2, [1, 2, 3, 4, 3, 9], max_new_tokens=2))
    driver.turn()
    # The prompt is sound; the position of the first output is not.
    assert driver.planned()[2] == 2
    driver.run()
    assert len(driver.outputs(2)) == 2
    driver.drain()
