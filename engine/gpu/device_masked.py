"""Draws of steps in which some row waits for its mask: captured, like the steps themselves.

Masks come while the step's forward runs. What is launched between them and the next step is time in
which the device may have nothing to do. So all rows of such a step are drawn then, by one launch:
results of those without a mask would not be sent any sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod.engine.sampling.sampler import LeaderTokens, Samples
from tokenpod.engine.steps.executor import Masks
from tokenpod.engine.steps.integers import Counts, Integers
from tokenpod.engine.steps.mailbox import Staging
from tokenpod.engine.steps.rounds import Drawing, Round, mask_words
from tokenpod.kernels.gpu.steps import remember

#: Columns begin at multiples of 64 bytes, see `Staging.upload`.
_UNIT = 8


def drawn_late(plan: StepPlan) -> bool:
    """Whether all rows of a captured step are drawn once masks are there."""
    return bool(plan.r_masked.any()) and not plan.drafts


class MaskedDraws:
    """What the captured draws of an executor read, and launch.

    Args:
        sampler: of all rows.
        last_token: [rows + 1] int64, where drawn tokens go too; the last one is padding's.
    """

    def __init__(self, sampler: DeviceSampler | LeaderTokens, last_token: torch.Tensor) -> None:
        rows = len(last_token) - 1
        self.sampler, self._last_token = sampler, last_token
        room = -(-rows // _UNIT) * _UNIT
        #: Rows, and which output of its sequence each draws.
        self._numbers = torch.zeros((2, room), dtype=torch.int64, device=last_token.device)
        self._numbers[0] = rows
        #: [rows, words]; there since the first launch.
        self._masks = torch.empty((rows, 0), dtype=torch.int32, device=last_token.device)

    def launch(self, counts: Counts, integers: Integers, logits: torch.Tensor) -> None:
        """What is captured: draw of the step's logits, [n, vocab]."""
        del integers
        words = mask_words(logits.shape[1])
        if self._masks.shape[1] != words:
            self._masks = self._masks.new_zeros((len(self._masks), words))
        rows, positions = self._numbers[:, : counts.samples]
        tokens = self.sampler.draw(logits, rows, positions, self._masks[: counts.samples])
        remember(tokens, rows, self._last_token)

    def enter(self, plan: StepPlan, size: int, masks: Masks, staging: Staging) -> None:
        """Send what a draw of `size` rows reads to the device; whose mask is late draws nothing."""
        sampled = np.flatnonzero(plan.r_samples)
        n = len(sampled)
        host, own = staging.room((2, -(-size // _UNIT) * _UNIT), np.int64)
        host[0] = len(self._last_token) - 1
        host[0, :n], host[1, :n] = plan.r_row[sampled], plan.r_output[sampled]
        self._numbers[:, : host.shape[1]].copy_(own, non_blocking=True)
        waiting = np.flatnonzero(plan.r_masked[sampled])
        words, own = staging.room((len(waiting), self._masks.shape[1]), np.int32)
        none = np.zeros((1, self._masks.shape[1]), np.int32)
        np.concatenate([masks.get(row, none) for row in sampled[waiting].tolist()], out=words)
        if len(waiting) == n:
            self._masks[:n].copy_(own, non_blocking=True)
            return
        self._masks[:n].fill_(-1)
        self._masks.index_copy_(0, staging.upload(waiting), staging.send(own))

    def drawn(self, logits: torch.Tensor, rows: int) -> Samples:
        """What has been drawn for the first rows, and what else they ask of it."""
        numbers, masks = self._numbers[:, :rows], self._masks[:rows]
        return self.sampler.drawn(logits[:rows], numbers[0], numbers[1], masks)


class MaskedDrawing(Drawing):
    """Draws a step that was captured, in which some row waits for its mask.

    Args:
        plan: the step's.
        logits: [size, vocab] of the rows, and of what fills them up.
        draws: of its executor.
        run: the captured draw of this size, of these logits.
        staging: the step's way to the device.
    """

    def __init__(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        *,
        draws: MaskedDraws,
        run: Callable[[torch.Tensor], object],
        staging: Staging,
    ) -> None:
        super().__init__(plan, logits, Samples.nothing(0, 0, logits.device))
        self._draws, self._run, self._staging = draws, run, staging

    def draw(self, turns: Sequence[Round], masks: Masks | None = None) -> None:
        """Nothing is drawn without masks."""
        assert masks is None
        assert not any(len(turn.rows) for turn in turns)

    def draw_masked(self, masks: Masks) -> None:
        """Draw for the rows that wait for masks."""
        self._draws.enter(self.plan, len(self.logits), masks, self._staging)
        self._run(self.logits)
        self.drawn = self._draws.drawn(self.logits, self.plan.sampling)
