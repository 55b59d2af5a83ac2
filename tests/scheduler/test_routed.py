import pytest
from scheduler_house import FailureCode, House, request


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
    house.advance(1, [request(1, [1] * 12)], until=[5])
    house.run()
    assert (house.ops_done, house.outputs(1)) == ([1], [])
    house.advance(2, resume=[1], resume_until=10)
    house.run()
    assert (house.ops_done, house.outputs(1)) == ([1, 2], [])
    house.advance(3, resume=[1])
    house.run()
    assert (house.ops_done, len(house.outputs(1))) == ([1, 2, 3], 1)


def test_steps_that_overlap_run_one_after_the_other(house):
    house.advance(1, [request(1, [1] * 12)], until=[10])
    house.advance(2, resume=[1])
    house.advance(3, resume=[1])
    house.run()
    assert house.ops_done == [1, 2, 3]
    assert len(house.outputs(1)) == 2


def test_the_whole_bound_is_reserved_or_nothing_exists(house):
    assert house.advance(1, [request(1, [1] * 20, max_new_tokens=40)]) is None
    failure = house.advance(2, [request(2, [2] * 5), request(3, [3] * 20, max_new_tokens=40)])
    assert failure.code == FailureCode.RESOURCE_EXHAUSTED
    assert "there are 100" in failure.message
    assert house.advance(3, [request(2, [2] * 5)]) is None


def test_rows_that_samples_were_promised_are_not_given_to_a_router(house):
    house.submit(request([1, 2, 3], [1] * 8))
    house.turn()
    failure = house.advance(1, [request(8, [2] * 4), request(9, [3] * 4)])
    assert failure.code == FailureCode.RESOURCE_EXHAUSTED
    assert "1 of 4 rows are free" in failure.message


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
        ({"resume": [7]}, "sequence 7 is not held by a router"),
        ({"start": [request([5, 6], [1])]}, "one sequence, not 2"),
        ({"start": [request(5, [1]), request(5, [2])]}, "sequence 5 exists already"),
        ({"start": [request(1, [1])]}, "sequence 1 exists already"),
        ({"start": [request(5, [1])], "until": []}, "1 and 0 sequences with (0, 0) positions"),
        ({"start": [request(5, [1] * 99)]}, "needs 103 tokens of KV cache; there are 100"),
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
