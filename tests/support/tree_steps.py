"""Trees of drafts by hand, on any executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stepping import VOCABULARY, Row, begin, take

from tokenpod.core.plan import LAST, plan_of
from tokenpod.engine.executor import Launcher
from tokenpod.scheduler.tree_shapes import Shape, way_along, widths_of

#: What a row drafts in its turn; of three rows in a row fewer than 9 tokens, two behind each.
SHAPES: list[Shape] = [(0, 1, 0, 3), (), (0, 0, 2, 2), (0,)]

#: (a tree, what comes next) -> its tokens.
Guess = Callable[[Shape, list[int]], list[int]]


def open_tree(shape: Shape, known: list[int]) -> list[int]:
    """Drafts that the executor finds."""
    del known
    return [LAST] * len(shape)


def some_right(shape: Shape, known: list[int]) -> list[int]:
    """Of those that follow a token the last one is right, behind wrong ones, too."""
    drafts, depths = [0] * len(shape), [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    for parent, depth in enumerate(depths):
        following = [at for at, before in enumerate(shape) if before == parent]
        for n, at in enumerate(reversed(following)):
            drafts[at] = (known[depth] + n) % VOCABULARY
    return drafts


def run(executor: Launcher, rows: list[Row], guess: Guess, expected: list[list[int]]) -> int:
    """Until all rows have their tokens; in how many steps."""
    begin(executor, rows)
    copies: list[tuple[int, int]] = []
    steps = 0
    while any(row.left for row in rows):
        planned = []
        for row in rows:
            if not row.left:
                continue
            shape = SHAPES[(row.row + steps) % len(SHAPES)]
            while len(widths_of(shape)) >= row.left:
                shape = shape[:-1]
            known = [*expected[row.row][len(row.outputs) :], *range(5)]
            drafts = guess(shape, known)
            planned.append((row, replace(row.step(drafts), parents=(-1, *shape))))
        planned.sort(key=lambda pair: len(pair[1].slots) > 1)
        plan = plan_of(steps + 2, [row for _, row in planned], copies=copies)
        before = [len(row.outputs) for row, _ in planned]
        take(planned, executor.launch(plan).wait())
        copies, end = [], 0
        for (row, step), known in zip(planned, before, strict=True):
            end += len(step.slots)
            shape = tuple(step.parents[1:])
            drafts = plan.t_token[end - len(shape) : end].tolist()
            way = way_along(shape, drafts, row.outputs[known:])
            slots = list(step.slots)
            copies += [(slots[n], slots[at]) for at, n in enumerate(way, 1) if n != at]
        steps += 1
    return steps
