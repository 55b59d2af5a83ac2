"""Which tokens of a step are branches of trees, and the way to each."""

from __future__ import annotations

import numpy as np
import pytest

from tokenpod.core.branches import Branches
from tokenpod.core.plan import PlanRow, StepPlan, plan_of


def test_a_branch_is_a_token_that_does_not_simply_follow():
    """The figure in core/branches.py, between rows without trees."""
    tokens = np.array([1, 6, 3])
    found = Branches.of(tokens, np.array([-1, -1, 0, 1, 2, 1, 0, -1, 0, 1]))
    assert found.t_depth.tolist() == [0, 0, 1, 2, 3, 2, 1, 0, 1, 2]
    assert found.tokens.tolist() == [5, 6]
    assert found.t_before.tolist() == [0, 1, 1, 2, 3, 2, 1, 7, 7, 8]
    assert [*found.trees] == [1]
    first, tree = found.trees[1]
    assert first == 1
    assert tree.ways[3:] == ((0, 1, 2, 3), (0, 1, 4), (0, 5))
    assert tree.way_tokens.tolist() == [0, 1, 4, 0, 5]
    assert tree.way_ends.tolist() == [3, 5]
    assert tree.asked.tolist() == [0, 1, 2]
    assert tree.following.tolist() == [[1, 5], [2, 4], [3, -1]]


@pytest.mark.parametrize("parents", [[-1, 1], [0, 0], [-1, -1], [-1, 0, 0], [-1, -2]])
def test_what_is_no_tree_is_refused(parents):
    with pytest.raises(ValueError, match="no trees"):
        Branches.of(np.array([2]), np.array(parents))


def test_plans_say_it_in_a_column_that_others_lack():
    rows = [
        PlanRow(0, 4, [7]),
        PlanRow(1, 4, [8, 9, 10], [1, 2, 3], samples=3, parents=(-1, 0, 0)),
    ]
    plan = StepPlan.from_bytes(plan_of(3, rows).to_bytes())
    assert plan.t_parent.tolist() == [-1, -1, 0, 0]
    assert plan.branches is not None
    assert plan.branches.tokens.tolist() == [3]
    assert not len(plan_of(3, rows[:1]).t_parent)
