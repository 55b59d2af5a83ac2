"""A step's columns survive the way to a follower, and say what was put into them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import LAST, PlanRow, StepPlan, plan_of
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.steps.integers import numbers_of, rows_of

NUMBERS = st.integers(0, 2**31 - 1)


@st.composite
def plan_rows(draw: st.DrawFn) -> PlanRow:
    n = draw(st.integers(1, 4))
    tokens = draw(st.lists(NUMBERS, min_size=n, max_size=n))
    sampling = SamplingParams(do_sample=draw(st.booleans()))
    new = NewRow(Request([1], [5], sampling, StoppingParams(1)), stream=0)
    return PlanRow(
        row=draw(NUMBERS),
        start=draw(NUMBERS),
        slots=draw(st.lists(NUMBERS, min_size=n, max_size=n)),
        tokens=None if n == 1 and draw(st.booleans()) else tokens,
        samples=draw(st.integers(0, n)),
        output=draw(NUMBERS),
        following=draw(st.lists(NUMBERS, max_size=n)),
        new=new if draw(st.booleans()) else None,
        prefix=draw(st.lists(NUMBERS, max_size=3)),
    )


@settings(deadline=None, derandomize=True)
@given(
    step=st.integers(0, 2**60),
    rows=st.lists(plan_rows(), max_size=5),
    freed=st.lists(NUMBERS, max_size=3),
)
def test_every_number_arrives(step: int, rows: list[PlanRow], freed: list[int]) -> None:
    plan = StepPlan.from_bytes(plan_of(step, rows, freed).to_bytes())
    assert plan.step == step
    assert plan.r_row.tolist() == [row.row for row in rows]
    assert plan.r_start.tolist() == [row.start for row in rows]
    assert plan.r_tokens.tolist() == [len(row.slots) for row in rows]
    assert plan.r_samples.tolist() == [row.samples for row in rows]
    assert plan.r_output.tolist() == [row.output for row in rows]
    assert plan.r_scored.tolist() == [len(row.following) for row in rows]
    assert plan.t_token.tolist() == [t for row in rows for t in row.tokens or [LAST]]
    assert plan.t_slot.tolist() == [slot for row in rows for slot in row.slots]
    assert plan.scored_token.tolist() == [t for row in rows for t in row.following]
    assert plan.freed.tolist() == freed
    new = [row for row in rows if row.new]
    assert plan.n_row.tolist() == [row.row for row in new]
    assert plan.n_flags.tolist() == [row.new.flags for row in new if row.new]
    assert plan.n_prefix.tolist() == [len(row.prefix) for row in new]
    assert plan.prefix_slot.tolist() == [slot for row in new for slot in row.prefix]
    assert not plan.asks


def test_a_follower_is_not_told_prompts_or_parameters() -> None:
    biased = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0))
    new = NewRow(Request([1], [7] * 5000, biased, StoppingParams(1)), stream=0)
    plan = plan_of(1, [PlanRow(0, 4999, [3], [7], new=new, prefix=[1, 2])])
    assert len(plan.to_bytes()) <= 156


@pytest.mark.parametrize("cut", [0, 4, 30, -4, 1])
def test_what_is_no_plan_is_refused(cut: int) -> None:
    data = plan_of(1, [PlanRow(0, 3, [1, 2], [3, 4])]).to_bytes()
    with pytest.raises(ValueError, match=r"words|multiple of element size"):
        StepPlan.from_bytes(data[:cut])


def test_numbers_below_zero_in_the_header_are_refused() -> None:
    words = np.frombuffer(plan_of(1, [PlanRow(0, 3, [1])]).to_bytes(), "<i4").copy()
    words[2] = -1
    with pytest.raises(ValueError, match="without a header"):
        StepPlan.from_bytes(words.tobytes())


def test_a_plan_does_not_change_once_it_is_written() -> None:
    plan = plan_of(1, [PlanRow(0, 3, [1, 2], [3, 4], given=np.ones((1, 2), np.float32))])
    for own in (plan, StepPlan.from_bytes(plan.to_bytes())):
        for column in (own.buffer, own.r_row, own.t_token):
            with pytest.raises(ValueError, match="read-only"):
                column[:] = 0
        with pytest.raises(AttributeError, match="does not change"):
            own.step = 2


ROW = ("r_start", "r_tokens", "r_samples", "r_output")


def test_rows_of_images_reach_followers_as_they_are() -> None:
    """In the leader's plan they are no copies; numbers of 16 bits are sent as such."""
    rows = torch.arange(9.0).reshape(3, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts = (rows[:2].to(dtype), rows[2:].to(dtype))
        plan = StepPlan.of(1, given=parts, r_row=[1], **{name: [0] for name in ROW})
        assert plan.given == parts
        data = plan.to_bytes(numbers_of)
        assert len(data) - len(plan.buffer) * 4 - 9 * dtype.itemsize in (0, 2)
        (sent,) = StepPlan.from_bytes(data).given
        assert torch.equal(rows_of(sent, dtype), rows.to(dtype))


def test_a_column_that_is_not_declared_or_of_another_length_is_refused() -> None:
    with pytest.raises(TypeError, match="no r_rows"):
        StepPlan.of(1, r_rows=[1])
    rows = {"r_start": [0], "r_tokens": [1], "r_samples": [1], "r_output": [0]}
    with pytest.raises(ValueError, match=r"of 32 words; its columns take 31"):
        StepPlan.of(1, r_row=[1], **{**rows, "r_output": [0, 0]})
    with pytest.raises(TypeError, match="same_kind"):
        StepPlan.of(1, r_row=[1.5], **rows)
