import numpy as np
import pytest

from support.engines.scheduler_driver import request
from tokenpod.core.outputs import FinishCode
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.table import Table

EOS, STOP = 8, 9


def finishes(outputs, *, now=0, **stopping):
    asked = request(1, [1, 2], **stopping)
    sequence = Sequence(asked, 0, np.array([1, 2], np.int32), Table())
    return [sequence.append(token, now) for token in outputs]


@pytest.mark.parametrize(
    ("token", "length_first", "finish"),
    [
        (5, False, FinishCode.LENGTH),
        (EOS, False, FinishCode.EOS),
        (STOP, False, FinishCode.STOP_TOKEN),
        (EOS, True, FinishCode.LENGTH),
        (STOP, True, FinishCode.LENGTH),
    ],
)
def test_the_last_allowed_token(token, length_first, finish):
    ends = finishes(
        [5, token],
        max_new_tokens=2,
        eos_token_ids=frozenset({EOS}),
        stop_token_ids=frozenset({STOP}),
        length_first=length_first,
    )
    assert ends == [FinishCode.RUNNING, finish]


def test_an_end_of_text_does_not_end_before_min_new_tokens():
    ends = finishes([EOS, EOS, EOS], min_new_tokens=2, eos_token_ids=frozenset({EOS}))
    assert ends == [FinishCode.RUNNING, FinishCode.RUNNING, FinishCode.EOS]


def test_an_end_of_text_that_is_not_listed_is_a_token():
    assert finishes([EOS], max_new_tokens=2) == [FinishCode.RUNNING]


def test_the_time_limit_ends_with_the_token_after_it():
    assert finishes([5], now=9, time_limit_at=10) == [FinishCode.RUNNING]
    assert finishes([5], now=10, time_limit_at=10) == [FinishCode.TIME_LIMIT]


def test_a_reason_of_its_own_wins_over_the_time_limit():
    ends = finishes([EOS], now=10, time_limit_at=10, eos_token_ids=frozenset({EOS}))
    assert ends == [FinishCode.EOS]


def test_places_are_used_again_and_a_table_grows():
    table, asked = Table(), request(1, [1, 2])
    sequences = [Sequence(asked, 0, np.array([1, 2], np.int32), table) for _ in range(200)]
    for number, sequence in enumerate(sequences):
        sequence.computed, sequence.row = number, 200 - number
    assert [sequence.computed for sequence in sequences] == list(range(200))
    assert table.computed[[s.place for s in sequences]].tolist() == list(range(200))
    assert [sequence.row for sequence in sequences] == list(range(200, 0, -1))
    place = sequences[7].place
    sequences[7].leave()
    again = Sequence(asked, 0, np.array([1, 2], np.int32), table)
    assert (again.place, again.computed, again.row, again.prompt_length) == (place, 0, -1, 2)
