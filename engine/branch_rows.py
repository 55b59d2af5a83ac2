"""Rows of a step for branches of trees of drafts: each is a row of its own.

Attention knows nothing of trees. What a branch sees is the way to it, so it gets a row of one token
with that as its context: on a host by runs of slots, on a device by a line of the row table that is
written before the step.

    line of the row      prefix | slot of token 0, 1, 2, 3, ...     the trunk's tokens, as ever
    line of a branch     prefix | slots of the tokens on the way to it
"""

from __future__ import annotations

import numpy as np

from tokenpod.core.plan import StepPlan
from tokenpod.kernels.batch import RaggedRows, Run, append_slots, cut_runs


def with_branches(rows: RaggedRows, plan: StepPlan, *, first_line: int | None) -> RaggedRows:
    """The rows of a step, those with branches divided.

    Args:
        rows: the plan's, trunk and branches together.
        plan: with branches.
        first_line: the line of the first branch of the step; None: rows are known by their runs.
    """
    assert plan.branches is not None
    b_start, b_context, b_row = [0], list[int](), list[int]()
    b_runs: list[list[Run]] = []
    line = first_line
    for row in range(rows.rows):
        first, tree = plan.branches.trees.get(row, (0, None))
        branches = [] if tree is None else tree.branches.tolist()
        end, context = rows.b_start[row + 1], rows.b_context[row] - len(branches)
        b_start.append(end - len(branches))
        b_context.append(context)
        b_row.append(rows.b_row[row])
        runs = rows.b_runs[row]
        if branches and line is None:
            runs = [*runs]
            cut_runs(runs, context)
        b_runs.append(runs)
        for branch in branches:
            token = first + branch
            b_start.append(token + 1)
            b_context.append(int(plan.r_start[row] + plan.branches.t_depth[token]) + 1)
            b_row.append(rows.b_row[row] if line is None else line)
            b_runs.append(runs_to(rows.b_runs[row], plan, row, token) if line is None else [])
            line = None if line is None else line + 1
    return RaggedRows(b_start, b_context, b_runs, b_row, rows.single_rows)


def runs_to(runs: list[Run], plan: StepPlan, row: int, token: int) -> list[Run]:
    """Where the positions up to a token of the step lie, of a plan's row with these runs."""
    own, start = [*runs], int(plan.r_start[row])
    if plan.branches is None or row not in plan.branches.trees:
        first = int(plan.r_tokens[: row + 1].sum() - plan.r_tokens[row])
        cut_runs(own, start + token - first + 1)
        return own
    first, tree = plan.branches.trees[row]
    cut_runs(own, start)
    append_slots(own, plan.t_slot[first + np.array(tree.ways[token - first])])
    return own


def lines_of(plan: StepPlan, first_line: int) -> tuple[np.ndarray, np.ndarray]:
    """What `branch` of `kernels.triton.steps` writes before a step with branches.

    Besides a line for each branch, the row's own: what of a tree is right lies there in the end.
    """
    assert plan.branches is not None
    lines, slots, done = [], [], 0
    for row, (first, tree) in plan.branches.trees.items():
        n, branches = len(tree.depth), len(tree.branches)
        own = plan.t_slot[first : first + n]
        part = np.empty((1 + branches, 5), np.int64)
        part[0, 0] = part[:, 1] = plan.r_row[row]
        part[1:, 0] = np.arange(first_line, first_line + branches)
        part[:, 2] = plan.r_start[row]
        part[0, 4] = done + n
        part[1:, 4] = done + n + tree.way_ends
        part[0, 3], part[1:, 3] = done, part[:-1, 4]
        lines.append(part)
        slots += [own, own[tree.way_tokens]]
        first_line, done = first_line + branches, int(part[-1, 4])
    return np.concatenate(lines), np.concatenate(slots).astype(np.int64)


def line_of(plan: StepPlan, first_line: int) -> np.ndarray:
    """[T] int64: of each token of a step, the line of the row table that has the way to it."""
    lines = plan.r_row.astype(np.int64).repeat(plan.r_tokens)
    if plan.branches is not None:
        tokens = plan.branches.tokens
        lines[tokens] = first_line + np.arange(len(tokens))
    return lines
