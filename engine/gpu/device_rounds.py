"""Later rounds of a step on the device: what is drawn behind drafts, and under masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod.engine.sampling.sampler import LeaderTokens, Samples
from tokenpod.engine.steps.executor import Masks
from tokenpod.engine.steps.mailbox import Staging
from tokenpod.engine.steps.rounds import Drawing, Ints, Round, allowed, mask_words, rounds
from tokenpod.kernels.gpu.steps import accept, remember
from tokenpod.kernels.sampling.offers import offer


class DeviceDrawing(Drawing):
    """Draws what does not belong to a step's first round, without waiting for the host.

    Args:
        plan: the step's.
        logits: [n + drafts, vocab]: of rows' first samples, of which there may be room for more,
            and then of the others, round after round.
        first_draft: where the logits of the others begin.
        first: the first round's samples; None: all wait for masks.
        t_token: [T] int64, the step's tokens, drafts among them.
        sampler: of all rows.
        last_token: [rows] int64, where drawn tokens go too.
        accepted: [rows] int64, where it goes how many drafts of a row are right.
        staging: the step's way to the device.
    """

    def __init__(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        first_draft: int,
        first: Samples | None,
        t_token: torch.Tensor,
        *,
        sampler: DeviceSampler | LeaderTokens,
        last_token: torch.Tensor,
        accepted: torch.Tensor,
        staging: Staging,
    ) -> None:
        super().__init__(plan, logits, Samples.nothing(0, 0, logits.device))
        self._sampler, self._last_token, self._staging = sampler, last_token, staging
        self._accepted = accepted
        self._shift, self._t_token = first_draft - plan.sampling, t_token
        #: Nothing but what is under masks is drawn.
        self._alone = first is None
        if first is not None:
            self._enter(first, slice(0, plan.sampling))

    def draw(self, turns: Sequence[Round], masks: Masks | None = None) -> None:
        """Draw these rounds into `drawn`: nothing behind a wrong draft, or where `masks` forbid."""
        turns = [turn for turn in turns if len(turn.rows)]
        if turns and turns[-1].place and self._may_join(turns):
            self._draw_joined(turns, masks)
        else:
            for turn in turns:
                self._draw_one(turn, masks)
        if turns:
            self._accept(np.unique(np.concatenate([turn.rows for turn in turns])))

    def _parts(self, n: int) -> Iterator[slice]:
        """As many samples at a time as the sampler has room for."""
        most = len(self._last_token) - 1  # of the last row is padding
        most -= most % 2 if most > 1 else 0  # see `Staging.upload`
        return (slice(at, at + most) for at in range(0, n, most))

    def _draw_one(self, turn: Round, masks: Masks | None) -> None:
        """Draw a round, with nothing where the draft before was wrong."""
        plan = self.plan
        numbers = np.empty((6, len(turn.rows)), np.int64)
        numbers[0] = plan.r_row[turn.rows]
        numbers[1] = plan.r_output[turn.rows] + turn.place
        numbers[2] = turn.at
        numbers[3] = turn.at
        if turn.place:
            numbers[3] += self._shift
        numbers[4] = turn.before if turn.place else -1
        numbers[5] = turn.behind
        rows, positions, at, index, before, drafts = self._staging.upload(numbers)
        bits = None if masks is None else self._bits([turn], masks)
        if turn.place:
            scores = offer(self.logits, index, self.drawn.tokens, before, self._t_token, drafts)
        else:
            scores = self._logits_at(numbers[3], index)
        self._sampler.begin(scores, rows, positions, bits)
        drawn = self._sampler.finish(scores, rows, positions, masks=bits)
        remember(drawn.tokens, rows, self._last_token)
        self._enter(drawn, _stretch(numbers[2], at))

    # -- several rounds ------------------------------------------------------------------------

    def _may_join(self, turns: Sequence[Round]) -> bool:
        """Whether these rounds can be drawn as one: a few launches, not some for each."""
        plan = self.plan
        rows = np.unique(np.concatenate([turn.rows for turn in turns]))
        return not self._sampler.edits(plan.r_row[rows[plan.r_samples[rows] > 1]].tolist())

    def _draw_joined(self, turns: Sequence[Round], masks: Masks | None) -> None:
        """Draw behind all drafts at once, right or wrong: no row's draw may depend on another's.

        What is behind a wrong draft is taken out when the results are read; here only each row's
        last token that counts matters.
        """
        plan = self.plan
        drawing = np.concatenate([turn.rows for turn in turns])
        places = np.repeat([turn.place for turn in turns], [len(turn.rows) for turn in turns])
        which = np.concatenate([turn.at for turn in turns])
        numbers = np.stack(
            [
                plan.r_row[drawing],
                plan.r_output[drawing] + places,
                which,
                which + np.where(places > 0, self._shift, 0),
            ]
        ).astype(np.int64)
        uploaded = self._staging.upload(numbers)
        bits = None if masks is None else self._bits(turns, masks)
        for part in self._parts(len(which)):
            rows, positions, at, index = uploaded[:, part]
            scores, own = self._logits_at(numbers[3, part], index), None
            if bits is not None:
                own = bits[part]
            self._sampler.begin(scores, rows, positions, own)
            drawn = self._sampler.finish(scores, rows, positions, masks=own)
            self._enter(drawn, _stretch(which[part], at))

    def _accept(self, rows: Ints) -> None:
        """Note how many drafts of each of these rows of the plan are right, and its last token."""
        column = np.full(self.plan.rows, -1)
        column[rows] = np.arange(len(rows))
        most = int(self.plan.r_samples[rows].max())
        numbers = np.full((1 + 2 * most, len(rows)), -1, np.int64)
        numbers[0] = self.plan.r_row[rows]
        for turn in islice(rounds(self.plan), most):
            which = column[turn.rows]
            there = which >= 0
            numbers[1 + turn.place, which[there]] = turn.at[there]
            numbers[1 + most + turn.place, which[there]] = turn.behind[there]
        uploaded = self._staging.upload(numbers)
        accept(uploaded, self.drawn.tokens, self._t_token, self._last_token, self._accepted)

    def _bits(self, turns: Sequence[Round], masks: Masks) -> torch.Tensor:
        """The masks of these rounds' samples."""
        words = mask_words(self.logits.shape[1])
        host, own = self._staging.room((sum(len(turn.rows) for turn in turns), words), np.int32)
        done = 0
        for turn in turns:
            allowed(masks, turn, host[done : done + len(turn.rows)])
            done += len(turn.rows)
        return self._staging.send(own)

    def _enter(self, samples: Samples, at: torch.Tensor | slice) -> None:
        """Enter what was drawn as samples `at`: a copy, where the sampler draws others besides."""
        if self._alone and at == slice(0, self.plan.samples):
            self.drawn = samples
            return
        if len(self.drawn.tokens) < self.plan.samples:
            tops, ranks = samples.top_ids.shape[1], samples.ranks is not None
            room = Samples.nothing(self.plan.samples, tops, self.logits.device, ranks=ranks)
            self.drawn = room
        self._put(samples, at)

    def _logits_at(self, host_index: Ints, index: torch.Tensor) -> torch.Tensor:
        """[m, vocab] these rows of the logits; not copied where they lie together."""
        where = _stretch(host_index, index)
        if isinstance(where, slice):
            return self.logits[where]
        return self.logits.index_select(0, where)


def _stretch(numbers: Ints, uploaded: torch.Tensor) -> torch.Tensor | slice:
    """The numbers as a stretch, if they follow each other."""
    first, last = int(numbers[0]), int(numbers[-1])
    rising = len(numbers) < 2 or bool((np.diff(numbers) == 1).all())
    return slice(first, last + 1) if rising else uploaded
