"""Later rounds of a step on the device: what is drawn behind drafts, and under masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.executor import Masks
from tokenpod.engine.rounds import Drawing, Round, allowed, drafts_at, rounds
from tokenpod.engine.sampler import LeaderTokens, Samples
from tokenpod.kernels.triton.offers import offer
from tokenpod.kernels.triton.steps import remember


class DeviceDrawing(Drawing):
    """Draws what does not belong to a step's first round, without waiting for the host.

    Args:
        plan: the step's.
        logits: [n + drafts, vocab]: of rows' first samples, of which there may be room for more,
            and then of the others, round after round.
        first_draft: where the logits of the others begin.
        first: the first round's samples.
        t_token: [T] int64, the step's tokens, drafts among them.
        sampler: of all rows.
        last_token: [rows] int64, where drawn tokens go too.
        upload: to the device.
    """

    def __init__(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        first_draft: int,
        first: Samples,
        t_token: torch.Tensor,
        *,
        sampler: DeviceSampler | LeaderTokens,
        last_token: torch.Tensor,
        upload: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        n, tops = first.top_ids.shape
        ranks = first.ranks is not None
        room = Samples.nothing(plan.samples, tops, logits.device, ranks=ranks)
        super().__init__(plan, logits, room)
        room.tokens[:n], room.logprobs[:n] = first.tokens, first.logprobs
        if room.ranks is not None and first.ranks is not None:
            room.ranks[:n] = first.ranks
        room.top_ids[:n], room.top_logprobs[:n] = first.top_ids, first.top_logprobs
        self._sampler, self._last_token, self._upload = sampler, last_token, upload
        self._shift, self._t_token = first_draft - n, t_token

    def draw_together(self) -> None:
        """Draw behind all drafts at once, right or wrong: no row's draw may depend on another's.

        What is behind a wrong draft is taken out when the results are read; here only each row's
        last token that counts matters.
        """
        plan, tokens = self.plan, self.drawn.tokens
        turns = [*rounds(plan)]
        first, total = len(turns[0].rows), len(tokens)
        rows = np.concatenate([turn.rows for turn in turns[1:]])
        places = np.repeat([turn.place for turn in turns[1:]], [len(t.rows) for t in turns[1:]])
        numbers = np.stack([plan.r_row[rows], plan.r_output[rows] + places])
        drawing, positions = self._upload(numbers.astype(np.int64))
        logits = self.logits[first + self._shift : total + self._shift]
        self._sampler.begin(logits, drawing, positions)
        drawn = self._sampler.finish(logits, drawing, positions)
        self._put(drawn, slice(first, total))
        drafting = turns[1].rows
        # Of each row with drafts: its samples, and which tokens they are right behind. Where a row
        # has fewer, none: no token equals that.
        at = np.zeros((len(turns), len(drafting)), np.int64)
        behind = np.full((len(turns), len(drafting)), -1)
        for turn in turns:
            which = np.searchsorted(drafting, turn.rows[np.isin(turn.rows, drafting)])
            at[turn.place, which] = turn.at[np.isin(turn.rows, drafting)]
            if turn.place:
                behind[turn.place, which] = drafts_at(plan, turn)
        uploaded = self._upload(np.concatenate([at, behind[1:], plan.r_row[drafting][None]]))
        own, drafts = tokens[uploaded[: len(turns)]], uploaded[len(turns) : -1]
        right = (own[:-1] == self._t_token[drafts.clamp(min=0)]) & (drafts >= 0)
        last = right.to(torch.int64).cumprod(0).sum(0, keepdim=True)
        remember(own.gather(0, last)[0], uploaded[-1], self._last_token)

    def draw(self, turns: Sequence[Round], masks: Masks | None = None) -> None:
        """See `Drawing.draw`."""
        plan = self.plan
        for turn in turns:
            if not len(turn.rows):
                continue
            numbers = np.empty((6, len(turn.rows)), np.int64)
            numbers[0] = plan.r_row[turn.rows]
            numbers[1] = plan.r_output[turn.rows] + turn.place
            numbers[2] = turn.at
            numbers[3] = turn.at
            if turn.place:
                numbers[3] += self._shift
            numbers[4] = turn.before if turn.place else -1
            numbers[5] = drafts_at(plan, turn)
            rows, positions, at, index, before, drafts = self._upload(numbers)
            bits = None
            if masks is not None:  # where there is none, nothing is allowed
                bits = self._upload(allowed(masks, turn, self.logits.shape[1]))
            scores = offer(self.logits, index, self.drawn.tokens, before, self._t_token, drafts)
            self._sampler.begin(scores, rows, positions, bits)
            drawn = self._sampler.finish(scores, rows, positions, masks=bits)
            remember(drawn.tokens, rows, self._last_token)
            self._put(drawn, at)
