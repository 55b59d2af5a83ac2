"""Lines of a device's row table for branches of trees of drafts: see `branch_rows`."""

from __future__ import annotations

import numpy as np
import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.branch_rows import line_of, lines_of
from tokenpod.engine.integers import Integers
from tokenpod.engine.mailbox import Staging
from tokenpod.kernels.triton.steps import branch


class BranchLines:
    """Writes them.

    Args:
        row_table: [lines, positions] int32.
        first: the line of a step's first branch.
    """

    def __init__(self, row_table: torch.Tensor, first: int) -> None:
        self._row_table, self._first = row_table, first

    def load(self) -> None:
        """Have the kernel ready: its first launch takes long."""
        line = torch.tensor([[self._first, self._first, 0, 0, 0]], device=self._row_table.device)
        branch(line, line[0], self._row_table)

    def write(self, plan: StepPlan, staging: Staging) -> None:
        """Queue what a step's branches need, before anything of it reads the table."""
        if plan.branches is None:
            return
        lines, slots = lines_of(plan, self._first)
        uploaded = staging.upload(np.concatenate([lines.ravel(), slots]))
        branch(uploaded[: lines.size].view(lines.shape), uploaded[lines.size :], self._row_table)

    def name(self, plan: StepPlan, host: Integers) -> None:
        """Give branches their lines among the step's integers, which are filled in."""
        if plan.branches is not None:
            host.t_row[: plan.tokens] = line_of(plan, self._first)
