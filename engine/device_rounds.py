"""Later rounds of a step on the device: what is drawn behind drafts, and under masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.executor import Masks
from tokenpod.engine.rounds import Round, allowed, drafts_of
from tokenpod.engine.sampler import LeaderTokens, Samples
from tokenpod.kernels.triton.offers import offer
from tokenpod.kernels.triton.steps import remember


@dataclass(frozen=True, slots=True)
class LaterRounds:
    """Draws what does not belong to a step's first round, without a word to the host."""

    sampler: DeviceSampler | LeaderTokens
    #: [rows] int64.
    last_token: torch.Tensor
    #: To the device.
    upload: Callable[[np.ndarray], torch.Tensor]
    plan: StepPlan
    #: [n + drafts, vocab]: of rows' first samples, of which there may be room for more, and then of
    #: the others, round after round.
    logits: torch.Tensor
    #: Where the logits of the others begin.
    first_draft: int
    #: All samples of the step, round after round; token -1 where nothing has been drawn.
    drawn: Samples

    def draw(self, turns: Sequence[Round], masks: Masks | None = None) -> None:
        """Draw these rounds into `drawn`: nothing behind a wrong draft, or where `masks` forbid."""
        plan, samples = self.plan, int(np.count_nonzero(self.plan.r_samples))
        for turn in turns:
            if not len(turn.rows):
                continue
            numbers = np.empty((6, len(turn.rows)), np.int64)
            numbers[0] = plan.r_row[turn.rows]
            numbers[1] = plan.r_output[turn.rows] + turn.place
            numbers[2] = turn.at
            numbers[3] = turn.at
            if turn.place:
                numbers[3] += self.first_draft - samples
            numbers[4] = turn.before if turn.place else -1
            numbers[5] = drafts_of(plan, turn)
            rows, positions, at, index, before, drafts = self.upload(numbers)
            bits = None
            if masks is not None:  # where there is none, nothing is allowed
                bits = self.upload(allowed(masks, turn, self.logits.shape[1]))
            scores = offer(self.logits, index, self.drawn.tokens, before, drafts)
            self.sampler.begin(scores, rows, positions, bits)
            drawn = self.sampler.finish(scores, rows, positions, masks=bits)
            remember(drawn.tokens, rows, self.last_token)
            self._put(drawn, at)

    def _put(self, samples: Samples, at: torch.Tensor) -> None:
        self.drawn.tokens[at] = samples.tokens
        self.drawn.logprobs[at] = samples.logprobs
        self.drawn.top_ids[at] = samples.top_ids
        self.drawn.top_logprobs[at] = samples.top_logprobs


def room_for(samples: int, first: Samples) -> Samples:
    """Room for so many samples, of which the first ones are there."""
    n, k = first.top_ids.shape
    room = Samples(
        first.tokens.new_full((samples,), -1),
        first.logprobs.new_zeros(samples),
        first.top_ids.new_full((samples, k), -1),
        first.top_logprobs.new_zeros(samples, k),
    )
    room.tokens[:n], room.logprobs[:n] = first.tokens, first.logprobs
    room.top_ids[:n], room.top_logprobs[:n] = first.top_ids, first.top_logprobs
    return room
