"""A step's columns survive the way to a follower, and say what was put into them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import LAST, PlanRow, StepPlan, plan_of
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams

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
    assert len(plan.to_bytes()) <= 124


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
