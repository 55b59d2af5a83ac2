"""`alternate` with `reserve` decides as TGI's router does, against a table worked by hand.

The rules are those of `next_batch` and of the loop around it in router 3.3.7, without chunking:

- Nothing runs: no minimum. Something runs: floor(running * ratio), or none once `waiting` has come
  to max_waiting_tokens. `waiting` is 1 after a join, and grows by one with each decode step.
- Entries are taken from the front while their prompts fit into the prefill budget, their bounds
  (input + max_new_tokens - 1) into what the running ones leave of the total budget, and their
  number into the maximal size less what runs. The first one beyond ends the search.
- Fewer than the minimum: all go back. So do they if fewer than that wait at all.
"""

from functools import partial

import pytest

from support.engines.scheduler_driver import Driver, Guesses, request
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.policies.by_name import ADMISSIONS, batching

#: Each prompt has 10 tokens, each output 41: a bound is 50. Prefill budget 40, total budget 500,
#: size 8, ratio 0.5, max_waiting_tokens 4.
LIMITS = {"slots": 500, "max_rows": 8, "prefill_tokens": 40, "max_positions": 500}


def tgi(ratio=0.5, **limits):
    return Driver(
        **LIMITS | limits,
        admission=ADMISSIONS["reserve"],
        batching=batching("alternate", ratio=ratio, max_waiting_tokens=4),
    )


def submit(driver, ids, prompt=10, new=41):
    for i in ids:
        driver.submit(request(i, [i] * prompt, max_new_tokens=new))


#: What is submitted before each turn: numbers of requests of the usual size; and what the turn
#: holds: a number of requests whose prompts it computes, or the number that it decodes.
TABLE = [
    # Nothing runs: three fit, nobody waits. waiting = 1.
    (3, "prefill 3"),
    # min = floor(3 * 0.5) = 1, nothing waits: decode. waiting = 2.
    (0, "decode 3"),
    # One waits, min is 1: it joins. waiting = 1.
    (1, "prefill 1"),
    # min = floor(4 * 0.5) = 2, one waits: decode. waiting = 2, 3, 4.
    (1, "decode 4"),
    (0, "decode 4"),
    (0, "decode 4"),
    # waiting = 4 >= max_waiting_tokens: no minimum any more. It joins. waiting = 1.
    (0, "prefill 1"),
    # min = floor(5 * 0.5) = 2 and two wait: both join. waiting = 1.
    (2, "prefill 2"),
    # min = floor(7 * 0.5) = 3, two wait: decode. waiting = 2.
    (2, "decode 7"),
    # Three wait, but the size is 8: one could join, less than the minimum. All go back.
    (1, "decode 7"),
    (0, "decode 7"),
    # waiting = 4: no minimum. The size lets one in.
    (0, "prefill 1"),
    # The size is reached.
    (0, "decode 8"),
    (0, "decode 8"),
]


def test_the_decisions_are_those_of_the_table():
    driver, ids = tgi(), 0
    for turn, (new, expected) in enumerate(TABLE):
        submit(driver, range(ids + 1, ids + new + 1))
        ids += new
        driver.turn()
        tokens = sorted(driver.planned().values())
        kind = "decode" if tokens == [1] * len(tokens) else "prefill"
        assert (f"{kind} {len(tokens)}", turn) == (expected, turn)
        assert kind == "decode" or set(tokens) == {10}, "whole prompts"
    driver.drain()


@pytest.mark.parametrize(
    ("waiting", "joins"),
    [
        # Prefill budget 40: four prompts of 10 tokens, the fifth ends the search.
        ([(10, 41)] * 6, 4),
        # The second one does not fit into it; the third one would, and does not overtake.
        ([(30, 11), (11, 11), (10, 11)], 1),
        # Total budget 500: bounds of 10 + 231 - 1 = 240; two take 480, and 20 are left.
        ([(10, 231)] * 3, 2),
        # A bound of 21 is one too many for these, of 20 it is not.
        ([(10, 231), (10, 231), (10, 12)], 2),
        ([(10, 231), (10, 231), (10, 11)], 3),
        # The size.
        ([(1, 2)] * 12, 8),
    ],
)
def test_as_many_join_an_empty_pod_as_budgets_let(waiting, joins):
    driver = tgi()
    for i, (prompt, new) in enumerate(waiting, 1):
        submit(driver, [i], prompt, new)
    driver.turn()
    assert len(driver.planned()) == joins
    driver.drain()


@pytest.mark.parametrize(("ratio", "least"), [(0.3, 1), (0.5, 2), (1.2, 4)])
def test_running_requests_are_interrupted_by_so_many_times_as_many(ratio, least):
    for waiting in (least - 1, least):
        driver = tgi(ratio)
        submit(driver, range(1, 5))
        driver.turn()
        # Four run: floor(4 * 0.3) = 1, floor(4 * 0.5) = 2, floor(4 * 1.2) = 4.
        submit(driver, range(5, 5 + waiting))
        driver.turn()
        joined = set(driver.planned()) - {1, 2, 3, 4}
        assert len(joined) == (waiting if waiting == least else 0)
        driver.drain()


class Wrong(Guesses):
    """Guesses what is never chosen."""

    def find(self, sequence, most):
        return [1] * most


def test_a_turn_in_which_no_stream_can_have_a_token_is_no_step_that_decodes():
    """Overlapped, rows with drafts wait in every other turn for the step that they are in."""
    driver = tgi(overlap=True, drafting=partial(Drafting, Wrong(1), 2))
    for i in range(1, 5):
        driver.submit(request(i, [i] * 10, max_new_tokens=41, drafts=2))
    driver.turn()
    # min = floor(4 * 0.5) = 2 and one waits: until waiting = 4.
    driver.submit(request(5, [5] * 10, max_new_tokens=41))
    decoded = 0
    while 5 not in driver.planned():
        driver.turn()
        decoded += bool(driver.planned()) and 5 not in driver.planned()
    assert decoded == 3
    driver.drain()


def test_memory_decides_whether_those_that_may_join_fit():
    driver = tgi()
    submit(driver, [1, 2], new=201)
    driver.turn()
    # Bounds of 210 leave 80: one of 50 fits, two do not. The minimum is 1.
    submit(driver, [3, 4])
    driver.turn()
    assert driver.planned() == {3: 10}
    driver.drain()


def test_one_that_has_outgrown_the_budget_joins_alone_and_is_computed_in_pieces():
    driver = tgi(prefill_tokens=20)
    submit(driver, [1, 2])
    for _ in range(30):
        driver.turn()
    # 10 + 29 tokens must be computed again; the budget is 20.
    assert driver.preempt(1) == [1]
    submit(driver, [3])
    planned = []
    while driver.scheduler.load().waiting:
        driver.turn()
        planned.append(driver.planned())
    first = next(at for at, each in enumerate(planned) if 1 in each)
    while len(planned) < first + 3:
        driver.turn()
        planned.append(driver.planned())
    assert all(set(each) == {1} for each in planned[first : first + 1])
    driver.drain()
    assert [len(driver.outputs(i)) for i in (1, 2, 3)] == [41, 41, 41]
