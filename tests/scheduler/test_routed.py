from dataclasses import replace

import numpy as np
import pytest

from support.engines.scheduler_driver import Driver, FailureCode, request
from tokenpod.core.plan import GIVEN
from tokenpod.core.requests import GivenVectors


@pytest.fixture(params=[False, True], ids=["settled at once", "overlapped"])
def driver(request):
    driver = Driver(overlap=request.param, slots=100, max_rows=4, prefill_tokens=8)
    yield driver
    driver.drain()


def test_a_step_gives_one_token_to_each_sequence_and_no_more(driver):
    driver.advance(1, [request(1, [1] * 3), request(2, [2] * 3)])
    driver.run()
    assert driver.ops_done == [1]
    driver.advance(2, resume=[1])
    driver.run()
    assert (len(driver.outputs(1)), len(driver.outputs(2))) == (2, 1)


def test_a_long_prompt_takes_several_steps_and_is_answered_once(driver):
    driver.advance(1, [request(1, [1] * 20)])
    sizes = []
    while driver.turn():
        sizes += driver.planned().values()
    assert sizes == [8, 8, 4]
    assert driver.ops_done == [1]
    assert len(driver.outputs(1)) == 1


def test_a_chunk_yields_no_token_until_it_ends_the_prompt(driver):
    driver.advance(1, [request(1, [1] * 12)], chunks=[3])
    driver.run()
    assert (driver.ops_done, driver.outputs(1)) == ([1], [])
    driver.advance(2, resume=[1])
    driver.run()
    # A step has room for 8 of the 9 that are left.
    assert (driver.ops_done, driver.outputs(1)) == ([1, 2], [])
    driver.advance(3, resume=[1])
    driver.run()
    assert (driver.ops_done, len(driver.outputs(1))) == ([1, 2, 3], 1)


def test_a_chunk_does_not_end_within_an_image(driver):
    image = GivenVectors(2, np.zeros((5, 1), np.float32), key=b"an image", mutual=True)
    seen = [GIVEN - i for i in range(5)]
    driver.scheduler.limits = replace(driver.scheduler.limits, mutual=8)
    driver.advance(1, [request(1, [1, 1, *seen, 1, 1, 1], given=[image])], chunks=[4])
    sizes = []
    while driver.turn():
        sizes += driver.planned().values()
    driver.advance(2, resume=[1])
    driver.run()
    assert (sizes, driver.ops_done, len(driver.outputs(1))) == ([2, 5], [1, 2], 1)


def test_streams_do_not_wait_for_the_prompts_that_join_them(driver):
    driver.advance(1, [request(1, [1] * 3, max_new_tokens=9)])
    driver.run()
    steps = []
    for op in range(2, 6):
        if op == 2:
            driver.advance(op, [request(2, [2] * 20), request(3, [3] * 5)], resume=[1])
        else:
            driver.advance(op, resume=[1, 2, 3])
        driver.turn()
        planned = driver.planned()
        driver.run()
        steps.append((planned, driver.waiting[op]))
    assert steps == [
        ({1: 1, 2: 8}, [2, 3]),
        ({1: 1, 2: 8}, [2, 3]),
        ({1: 1, 2: 4, 3: 4}, [3]),
        ({1: 1, 2: 1, 3: 1}, []),
    ]
    assert [len(driver.outputs(i)) for i in (1, 2, 3)] == [5, 2, 1]


def test_steps_that_overlap_run_one_after_the_other(driver):
    driver.advance(1, [request(1, [1] * 12)], chunks=[10])
    driver.advance(2, resume=[1])
    driver.advance(3, resume=[1])
    driver.run()
    assert driver.ops_done == [1, 2, 3]
    assert len(driver.outputs(1)) == 2


def test_a_request_waits_until_its_whole_bound_is_free(driver):
    driver.advance(1, [request(1, [1] * 20, max_new_tokens=41)])
    driver.advance(2, [request(2, [2] * 5), request(3, [3] * 5, max_new_tokens=50)])
    driver.run()
    assert (driver.waiting[2], len(driver.outputs(2)), driver.outputs(3)) == ([3], 1, [])
    driver.abort(1)
    driver.advance(3, resume=[2, 3])
    driver.run()
    assert (driver.waiting[3], len(driver.outputs(3))) == ([], 1)


def test_the_last_tokens_keys_and_values_are_not_reserved(driver):
    driver.advance(
        1, [request(1, [1] * 50, max_new_tokens=26), request(2, [2] * 24, max_new_tokens=2)]
    )
    driver.run()
    assert driver.waiting[1] == []
    assert (len(driver.outputs(1)), len(driver.outputs(2))) == (1, 1)


def test_a_batch_beyond_all_memory_is_refused(driver):
    failure = driver.advance(1, [request(i, [i] * 20, max_new_tokens=20) for i in range(3)])
    assert failure.code == FailureCode.RESOURCE_EXHAUSTED
    assert "needs 117 tokens of KV cache" in failure.message
    assert "there are 100" in failure.message


def test_what_waits_for_a_router_is_bounded(driver):
    for op in range(3):
        driver.advance(op, [request(10 + op, [op] * 60, max_new_tokens=30)])
        driver.run()
    failure = driver.advance(4, [request(20, [4] * 60, max_new_tokens=30)])
    assert failure.code == FailureCode.RESOURCE_EXHAUSTED
    assert "requests that wait 178" in failure.message


def test_those_beyond_the_rows_wait_and_are_named(driver):
    driver.advance(1, [request(i, [i] * 3) for i in range(1, 7)])
    driver.run()
    assert driver.waiting[1] == [5, 6]
    assert [len(driver.outputs(i)) for i in range(1, 7)] == [1, 1, 1, 1, 0, 0]
    driver.abort(2)
    driver.advance(2, resume=[1, 3, 4, 5, 6])
    driver.run()
    assert driver.waiting[2] == [6]
    assert len(driver.outputs(5)) == 1


def test_a_step_of_new_requests_that_all_wait_is_answered_at_once(driver):
    driver.advance(1, [request(i, [i] * 3) for i in range(1, 5)])
    driver.run()
    driver.advance(2, [request(9, [9] * 3)])
    driver.run()
    assert (driver.ops_done, driver.waiting[2]) == ([1, 2], [9])


def test_a_step_that_can_step_nobody_waits_until_it_can(driver):
    driver.advance(1, [request(i, [i] * 3) for i in range(1, 5)])
    driver.run()
    driver.advance(2, [request(9, [9] * 3)])
    driver.run()
    driver.advance(3, resume=[9], waits=True)
    driver.run()
    assert driver.ops_done == [1, 2]
    driver.abort(3)
    driver.run()
    assert driver.ops_done == [1, 2, 3]
    assert len(driver.outputs(9)) == 1


def test_a_step_that_waits_is_over_when_its_sequences_are_gone(driver):
    driver.advance(1, [request(i, [i] * 3) for i in range(1, 5)])
    driver.run()
    driver.advance(2, [request(9, [9] * 3)])
    driver.run()
    driver.advance(3, resume=[9], waits=True)
    driver.abort(9)
    driver.run()
    assert driver.ops_done == [1, 2, 3]


def test_callers_and_routers_are_served_in_the_order_in_which_they_came(driver):
    driver.advance(1, [request(i, [i] * 3) for i in range(1, 5)])
    driver.run()
    driver.submit(request(10, [1] * 3, max_new_tokens=1))
    driver.advance(2, [request(11, [2] * 3)])
    driver.submit(request(12, [3] * 3, max_new_tokens=1))
    driver.run()
    assert (driver.outputs(10), driver.waiting[2], driver.outputs(12)) == ([], [11], [])
    driver.abort(1)
    driver.run()
    # The first caller's row goes to the router, and the second caller waits.
    assert (len(driver.outputs(10)), driver.outputs(12)) == (1, [])
    driver.advance(3, resume=[11])
    driver.run()
    assert driver.waiting[3] == []
    driver.abort(2)
    driver.run()
    assert len(driver.outputs(12)) == 1


def test_rows_that_samples_were_promised_are_not_given_to_a_router(driver):
    driver.submit(request([1, 2, 3], [1] * 8))
    driver.turn()
    driver.advance(1, [request(8, [2] * 4), request(9, [3] * 4)])
    driver.turn()
    assert driver.waiting.get(1, [9]) == [9]
    assert 9 not in driver.planned()


def test_a_probe_runs_when_every_row_and_slot_is_taken(driver):
    driver.advance(1, [request(i, [i] * 20, max_new_tokens=6) for i in range(1, 5)])
    driver.run()
    for sequence_id in (20, 21, 22):
        driver.submit(request(sequence_id, [7] * 10, max_new_tokens=1, probe=True))
    driver.run()
    assert [len(driver.outputs(i)) for i in (20, 21, 22)] == [1, 1, 1]
    assert driver.waiting[1] == []


def test_a_probe_of_many_tokens_is_refused(driver):
    driver.submit(request(1, [1] * 16, max_new_tokens=1, probe=True))
    assert driver.sequences[1].ended == "failure INVALID_ARGUMENT"


def test_a_probe_that_is_given_up_gives_way(driver):
    for sequence_id in (1, 2):
        driver.submit(request(sequence_id, [7] * 3, max_new_tokens=1, probe=True))
    driver.turn()
    driver.abort(1)
    driver.run()
    assert len(driver.outputs(2)) == 1


def test_what_a_router_holds_is_not_given_away(driver):
    driver.advance(1, [request(1, [1] * 20, max_new_tokens=40)])
    driver.run()
    driver.submit(request(2, [2] * 20, max_new_tokens=30))
    driver.run()
    assert driver.scheduler.load().waiting
    driver.abort(1)
    driver.run()
    assert len(driver.outputs(2)) == 30


def test_prompts_of_router_and_batcher_share_the_budget(driver):
    driver.submit(request(1, [1] * 30))
    driver.turn()
    driver.advance(1, [request(2, [2] * 30)])
    driver.turn()
    assert driver.planned() == {2: 4, 1: 4}


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ({"resume": [7]}, "sequence 7 is not a router's"),
        ({"start": [request([5, 6], [1])]}, "one sequence, not 2"),
        ({"start": [request(5, [1]), request(5, [2])]}, "sequence 5 exists already"),
        ({"start": [request(1, [1])]}, "sequence 1 exists already"),
        ({"start": [request(5, [1])], "chunks": []}, "1 sequences with 0 pieces"),
        ({"start": [request(5, [1] * 99)]}, "needs 102 tokens of KV cache; there are 100"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_whole(driver, op, why):
    driver.advance(1, [request(1, [1] * 4)])
    failure = driver.advance(2, **op)
    assert failure.code == FailureCode.INVALID_ARGUMENT
    assert why in failure.message
    driver.run()
    assert driver.ops_done == [1]


def test_a_step_completes_when_all_its_sequences_are_gone(driver):
    driver.advance(1, [request(1, [1] * 20)])
    driver.turn()
    driver.abort(1)
    driver.run()
    assert driver.ops_done == [1]


def test_a_step_of_nothing_completes(driver):
    driver.advance(1)
    driver.turn()
    assert driver.ops_done == [1]
