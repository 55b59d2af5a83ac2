import pytest
from scheduler_driver import FailureCode, House, request


@pytest.fixture(params=[False, True], ids=["settled at once", "overlapped"])
def house(request):
    house = House(overlap=request.param, slots=100, max_rows=4, prefill_tokens=8)
    yield house
    house.drain()


def test_a_step_gives_one_token_to_each_sequence_and_no_more(house):
    house.advance(1, [request(1, [1] * 3), request(2, [2] * 3)])
    house.run()
    assert house.ops_done == [1]
    house.advance(2, resume=[1])
    house.run()
    assert (len(house.outputs(1)), len(house.outputs(2))) == (2, 1)


def test_a_long_prompt_takes_several_steps_and_is_answered_once(house):
    house.advance(1, [request(1, [1] * 20)])
    sizes = []
    while house.turn():
        sizes += house.planned().values()
    assert sizes == [8, 8, 4]
    assert house.ops_done == [1]
    assert len(house.outputs(1)) == 1


def test_a_chunk_yields_no_token_until_it_ends_the_prompt(house):
    house.advance(1, [request(1, [1] * 12)], chunks=[3])
    house.run()
    assert (house.ops_done, house.outputs(1)) == ([1], [])
    house.advance(2, resume=[1])
    house.run()
    # A step has room for 8 of the 9 that are left.
    assert (house.ops_done, house.outputs(1)) == ([1, 2], [])
    house.advance(3, resume=[1])
    house.run()
    assert (house.ops_done, len(house.outputs(1))) == ([1, 2, 3], 1)


def test_streams_do_not_wait_for_the_prompts_that_join_them(house):
    house.advance(1, [request(1, [1] * 3, max_new_tokens=9)])
    house.run()
    steps = []
    for op in range(2, 6):
        if op == 2:
            house.advance(op, [request(2, [2] * 20), request(3, [3] * 5)], resume=[1])
        else:
            house.advance(op, resume=[1, 2, 3])
        house.turn()
        planned = house.planned()
        house.run()
        steps.append((planned, house.waiting[op]))
    assert steps == [
        ({1: 1, 2: 8}, [2, 3]),
        ({1: 1, 2: 8}, [2, 3]),
        ({1: 1, 2: 4, 3: 4}, [3]),
        ({1: 1, 2: 1, 3: 1}, []),
    ]
    assert [len(house.outputs(i)) for i in (1, 2, 3)] == [5, 2, 1]


def test_steps_that_overlap_run_one_after_the_other(house):
    house.advance(1, [request(1, [1] * 12)], chunks=[10])
    house.advance(2, resume=[1])
    house.advance(3, resume=[1])
    house.run()
    assert house.ops_done == [1, 2, 3]
    assert len(house.outputs(1)) == 2


def test_a_request_waits_until_its_whole_bound_is_free(house):
    house.advance(1, [request(1, [1] * 20, max_new_tokens=41)])
    house.advance(2, [request(2, [2] * 5), request(3, [3] * 5, max_new_tokens=50)])
    house.run()
    assert (house.waiting[2], len(house.outputs(2)), house.outputs(3)) == ([3], 1, [])
    house.abort(1)
    house.advance(3, resume=[2, 3])
    house.run()
    assert (house.waiting[3], len(house.outputs(3))) == ([], 1)


def test_the_last_tokens_keys_and_values_are_not_reserved(house):
    house.advance(
        1, [request(1, [1] * 50, max_new_tokens=26), request(2, [2] * 24, max_new_tokens=2)]
    )
    house.run()
    assert house.waiting[1] == []
    assert (len(house.outputs(1)), len(house.outputs(2))) == (1, 1)


def test_a_batch_beyond_all_memory_is_refused(house):
    failure = house.advance(1, [request(i, [i] * 20, max_new_tokens=20) for i in range(3)])
    assert failure.code == FailureCode.RESOURCE_EXHAUSTED
    assert "needs 117 tokens of KV cache" in failure.message
    assert "there are 100" in failure.message


def test_what_waits_for_a_router_is_bounded(house):
    for op in range(3):
        house.advance(op, [request(10 + op, [op] * 60, max_new_tokens=30)])
        house.run()
    failure = house.advance(4, [request(20, [4] * 60, max_new_tokens=30)])
    assert failure.code == FailureCode.RESOURCE_EXHAUSTED
    assert "requests that wait 178" in failure.message


def test_those_beyond_the_rows_wait_and_are_named(house):
    house.advance(1, [request(i, [i] * 3) for i in range(1, 7)])
    house.run()
    assert house.waiting[1] == [5, 6]
    assert [len(house.outputs(i)) for i in range(1, 7)] == [1, 1, 1, 1, 0, 0]
    house.abort(2)
    house.advance(2, resume=[1, 3, 4, 5, 6])
    house.run()
    assert house.waiting[2] == [6]
    assert len(house.outputs(5)) == 1


def test_a_step_of_new_requests_that_all_wait_is_answered_at_once(house):
    house.advance(1, [request(i, [i] * 3) for i in range(1, 5)])
    house.run()
    house.advance(2, [request(9, [9] * 3)])
    house.run()
    assert (house.ops_done, house.waiting[2]) == ([1, 2], [9])


def test_a_step_that_can_step_nobody_waits_until_it_can(house):
    house.advance(1, [request(i, [i] * 3) for i in range(1, 5)])
    house.run()
    house.advance(2, [request(9, [9] * 3)])
    house.run()
    house.advance(3, resume=[9], waits=True)
    house.run()
    assert house.ops_done == [1, 2]
    house.abort(3)
    house.run()
    assert house.ops_done == [1, 2, 3]
    assert len(house.outputs(9)) == 1


def test_a_step_that_waits_is_over_when_its_sequences_are_gone(house):
    house.advance(1, [request(i, [i] * 3) for i in range(1, 5)])
    house.run()
    house.advance(2, [request(9, [9] * 3)])
    house.run()
    house.advance(3, resume=[9], waits=True)
    house.abort(9)
    house.run()
    assert house.ops_done == [1, 2, 3]


def test_callers_and_routers_are_served_in_the_order_in_which_they_came(house):
    house.advance(1, [request(i, [i] * 3) for i in range(1, 5)])
    house.run()
    house.submit(request(10, [1] * 3, max_new_tokens=1))
    house.advance(2, [request(11, [2] * 3)])
    house.submit(request(12, [3] * 3, max_new_tokens=1))
    house.run()
    assert (house.outputs(10), house.waiting[2], house.outputs(12)) == ([], [11], [])
    house.abort(1)
    house.run()
    # The first caller's row goes to the router, and the second caller waits.
    assert (len(house.outputs(10)), house.outputs(12)) == (1, [])
    house.advance(3, resume=[11])
    house.run()
    assert house.waiting[3] == []
    house.abort(2)
    house.run()
    assert len(house.outputs(12)) == 1


def test_rows_that_samples_were_promised_are_not_given_to_a_router(house):
    house.submit(request([1, 2, 3], [1] * 8))
    house.turn()
    house.advance(1, [request(8, [2] * 4), request(9, [3] * 4)])
    house.turn()
    assert house.waiting.get(1, [9]) == [9]
    assert 9 not in house.planned()


def test_a_probe_runs_when_every_row_and_slot_is_taken(house):
    house.advance(1, [request(i, [i] * 20, max_new_tokens=6) for i in range(1, 5)])
    house.run()
    for sequence_id in (20, 21, 22):
        house.submit(request(sequence_id, [7] * 10, max_new_tokens=1, probe=True))
    house.run()
    assert [len(house.outputs(i)) for i in (20, 21, 22)] == [1, 1, 1]
    assert house.waiting[1] == []


def test_a_probe_of_many_tokens_is_refused(house):
    house.submit(request(1, [1] * 16, max_new_tokens=1, probe=True))
    assert house.sequences[1].ended == "failure INVALID_ARGUMENT"


def test_a_probe_that_is_given_up_gives_way(house):
    for sequence_id in (1, 2):
        house.submit(request(sequence_id, [7] * 3, max_new_tokens=1, probe=True))
    house.turn()
    house.abort(1)
    house.run()
    assert len(house.outputs(2)) == 1


def test_what_a_router_holds_is_not_given_away(house):
    house.advance(1, [request(1, [1] * 20, max_new_tokens=40)])
    house.run()
    house.submit(request(2, [2] * 20, max_new_tokens=30))
    house.run()
    assert house.scheduler.waiting
    house.abort(1)
    house.run()
    assert len(house.outputs(2)) == 30


def test_prompts_of_router_and_batcher_share_the_budget(house):
    house.submit(request(1, [1] * 30))
    house.turn()
    house.advance(1, [request(2, [2] * 30)])
    house.turn()
    assert house.planned() == {2: 4, 1: 4}


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
def test_a_step_that_makes_no_sense_is_refused_whole(house, op, why):
    house.advance(1, [request(1, [1] * 4)])
    failure = house.advance(2, **op)
    assert failure.code == FailureCode.INVALID_ARGUMENT
    assert why in failure.message
    house.run()
    assert house.ops_done == [1]


def test_a_step_completes_when_all_its_sequences_are_gone(house):
    house.advance(1, [request(1, [1] * 20)])
    house.turn()
    house.abort(1)
    house.run()
    assert house.ops_done == [1]


def test_a_step_of_nothing_completes(house):
    house.advance(1)
    house.turn()
    assert house.ops_done == [1]
