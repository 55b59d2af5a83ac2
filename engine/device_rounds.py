"""Later rounds of a step on the device: what is drawn behind drafts, launch after launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.device_sampler import DeviceSamples
from tokenpod.engine.rounds import drafts_of, rounds
from tokenpod.kernels.triton.steps import remember


class RoundSampler(Protocol):
    """A rank's sampler."""

    def begin(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `DeviceSampler.begin`."""
        ...

    def finish(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> DeviceSamples:
        """See `DeviceSampler.finish`."""
        ...


def draw_later(
    plan: StepPlan,
    logits: torch.Tensor,
    first: DeviceSamples,
    sampler: RoundSampler,
    last_token: torch.Tensor,
    upload: Callable[[np.ndarray], torch.Tensor],
) -> DeviceSamples:
    """Draw what comes after each row's first sample, without a word to the host.

    Args:
        plan: with drafts.
        logits: [drafts or more, vocab]: of samples of later rounds, round after round.
        first: of the first round.
        sampler: has drawn the first round.
        last_token: [rows] int64.
        upload: to the device.

    Returns:
        [n] all samples, round after round; -1 behind a wrong draft.
    """
    n, done = int(plan.r_samples.sum()), len(first.tokens)
    drawn = DeviceSamples(
        first.tokens.new_full((n,), -1),
        first.logprobs.new_zeros(n),
        first.top_ids.new_full((n, first.top_ids.shape[1]), -1),
        first.top_logprobs.new_zeros(n, first.top_logprobs.shape[1]),
    )
    _put(first, drawn, 0)
    for turn in rounds(plan):
        if turn.place == 0:
            continue
        m, at = len(turn.rows), int(turn.at[0])
        numbers = np.empty((4, m), np.int64)
        numbers[0], numbers[1] = plan.r_row[turn.rows], plan.r_output[turn.rows] + turn.place
        numbers[2], numbers[3] = turn.before, drafts_of(plan, turn)
        rows, positions, before, drafts = upload(numbers)
        wrong = drawn.tokens.index_select(0, before) != drafts
        # From nothing, nothing is drawn; and what is not drawn is noted nowhere.
        scores = logits[at - done : at - done + m].masked_fill(wrong[:, None], -torch.inf)
        sampler.begin(scores, rows, positions)
        samples = sampler.finish(scores, rows, positions)
        remember(samples.tokens, rows, last_token)
        _put(samples, drawn, at)
    return drawn


def _put(samples: DeviceSamples, into: DeviceSamples, at: int) -> None:
    end = at + len(samples.tokens)
    into.tokens[at:end] = samples.tokens
    into.logprobs[at:end] = samples.logprobs
    into.top_ids[at:end] = samples.top_ids
    into.top_logprobs[at:end] = samples.top_logprobs
