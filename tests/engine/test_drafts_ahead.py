"""Drafts that a device finds behind a step, before the next one is planned."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.kernels.interpreted import DEVICE
from support.kernels.layouts import alike
from tokenpod.core.capacity import spare_draft_slots
from tokenpod.core.plan import LAST, PlanRow, StepPlan, plan_of
from tokenpod.engine.gpu.device_drafts import Proposals
from tokenpod.engine.steps.mailbox import Mailbox
from tokenpod.engine.steps.open_drafts import Unknown
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.gpu.steps import accept

VOCABULARY, ROWS, MOST, POSITIONS = 97, 4, 3, 24
SLOTS = ROWS * POSITIONS


class Sums:
    """A draft model whose guess depends on token, position and all slots of the text before it.

    It keeps each token at its slot, so that what lies at a wrong slot changes what is guessed.
    """

    def __init__(self, spare: int) -> None:
        self.most, self.each, self.behind = MOST, 1, False
        self.pool = KVPool(
            slots=SLOTS + spare, layouts=[alike(1, 1)], dtype=torch.float32, device=DEVICE
        )
        self.kept = self.pool.keys[0][:, 0, 0]
        self.passes = 0

    def logits(self, batch: SimpleNamespace, drafts: int) -> torch.Tensor:
        assert drafts == 1
        self.passes += 1
        self.kept[batch.t_slot] = batch.t_token.float()
        guesses = []
        for token, position, row in zip(
            batch.t_token.tolist(), batch.t_place.tolist(), batch.t_row.tolist(), strict=True
        ):
            slots = batch.row_table[row, : position + 1].long()
            seen = int((self.kept[slots] * (1 + torch.arange(position + 1))).sum())
            guesses.append((seen + 7 * token + position) % VOCABULARY)
        return torch.nn.functional.one_hot(torch.tensor(guesses), VOCABULARY).float().to(DEVICE)


class Likeliest:
    """A sampler that notes for which rows and outputs it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def propose(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        self.asked.append((rows.tolist(), positions.tolist()))
        return logits.argmax(1)


class Device:
    """What an executor has, and steps whose draws are chosen."""

    def __init__(self, *, ahead: bool) -> None:
        self.draft = Sums(spare_draft_slots(MOST, ROWS) if ahead else 0)
        self.sampler = Likeliest()
        # Of all that is not written a text must see nothing.
        self.table = torch.full((ROWS + 1, POSITIONS), SLOTS, dtype=torch.int32, device=DEVICE)
        self.last = torch.zeros(ROWS + 1, dtype=torch.int64, device=DEVICE)
        self.accepted = torch.zeros_like(self.last)
        self.proposals = Proposals(
            self.draft,
            self.sampler,  # type: ignore[arg-type]
            self.batch,  # type: ignore[arg-type]
            row_table=self.table,
            last_token=self.last,
            accepted=self.accepted,
            upload=lambda values: torch.from_numpy(values).to(DEVICE),
        )
        self.proposals.use(SLOTS)
        self.mailbox = Mailbox(ROWS, 64, DEVICE, self.proposals.room)

    def batch(self, integers, t_token):
        return SimpleNamespace(
            t_token=t_token,
            t_place=integers.t_place,
            t_slot=integers.t_slot,
            t_row=integers.t_row,
            row_table=self.table,
        )

    def step(self, plan: StepPlan, right: list[int]) -> list[int]:
        """The drafts of a step, of which the first ones are right, of each row as many as said.

        A wrong one is followed by the token 90 + row.
        """
        self.mailbox.staging.begin()
        self.mailbox.begin()
        unknown = Unknown.of(plan)
        assert unknown is not None
        at, found = self.proposals.find(plan, self.mailbox, unknown)
        tokens = torch.from_numpy(plan.t_token.astype(np.int64)).to(DEVICE)
        tokens[at] = found
        tokens[tokens == LAST] = self.last[:ROWS][plan.r_row]
        self.follow(plan, tokens)
        drawn, columns = [], np.full((1 + 2 * (MOST + 1), plan.rows), -1)
        for row, (first, n) in enumerate(zip(unknown.firsts, plan.r_samples, strict=True)):
            own = [*tokens[first + 1 : first + n].tolist(), 95]
            own[right[row]] = 90 + row
            columns[0, row] = plan.r_row[row]
            columns[1 : 1 + n, row] = range(len(drawn), len(drawn) + n)
            columns[2 + MOST : 2 + MOST + n, row] = range(first, first + n)
            drawn += own
        accept(
            torch.from_numpy(columns).to(DEVICE),
            torch.tensor(drawn, device=DEVICE),
            tokens,
            self.last,
            self.accepted,
        )
        assert self.last[plan.r_row].tolist() == [90 + row for row in range(plan.rows)]
        assert self.accepted[plan.r_row].tolist() == right
        self.proposals.find_ahead(plan, self.mailbox, unknown)
        return found.tolist()

    def follow(self, plan: StepPlan, tokens: torch.Tensor) -> None:
        """Keep a step's tokens where its plan says."""
        ends = plan.r_tokens.cumsum()
        for row, end in enumerate(ends.tolist()):
            n, start = int(plan.r_tokens[row]), int(plan.r_start[row])
            slots = torch.from_numpy(plan.t_slot[end - n : end].astype(np.int64)).to(DEVICE)
            self.draft.kept[slots] = tokens[end - n : end].float()
            self.table[plan.r_row[row], start : start + n] = slots.to(torch.int32)


def planned(starts: dict[int, int], drafts: dict[int, int], before: int = 2) -> StepPlan:
    """A step of rows with these positions; `before`: tokens of each prompt."""
    rows = [
        PlanRow(
            row,
            start,
            [ROWS * position + row for position in range(start, start + 1 + drafts[row])],
            [LAST] * (1 + drafts[row]),
            samples=1 + drafts[row],
            output=start - before + 1,
        )
        for row, start in starts.items()
    ]
    return plan_of(1, rows)


# The first step's are not there yet; nor are they where a row is to have more than before.
@pytest.mark.parametrize(("rows", "passes"), [([0], [6, 3, 3, 2, 1]), ([2, 0, 3], [6, 3, 3, 4, 2])])
def test_they_are_those_that_are_found_when_the_step_is_planned(rows, passes):
    ahead, later = Device(ahead=True), Device(ahead=False)
    starts = dict.fromkeys(rows, 2)
    counts = [[3, 3, 3], [3, 2, 3], [3, 1, 2], [2, 2, 2], [1, 1, 2]]
    rights = [[0, 1, 3], [3, 2, 0], [2, 1, 1], [2, 0, 2], [0, 0, 0]]
    for step, (count, right) in enumerate(zip(counts, rights, strict=True)):
        drafts = dict(zip(rows, count, strict=False))
        own = right[: len(rows)]
        plan = planned(starts, drafts)
        before = ahead.draft.passes
        found = ahead.step(plan, own)
        assert found == later.step(plan, own), step
        assert ahead.draft.passes - before == passes[step]
        for row, accepted in zip(rows, own, strict=True):
            starts[row] += 1 + accepted


def test_the_noise_is_that_of_the_outputs_that_they_guess():
    device = Device(ahead=True)
    device.step(planned({1: 2}, {1: 3}), [2])
    device.sampler.asked.clear()
    device.step(planned({1: 5}, {1: 2}), [0])
    # Of the next step, as no draft is right: three more outputs are known.
    assert device.sampler.asked == [([1], [5]), ([1], [6])]


def test_what_was_found_for_rows_that_are_free_or_have_moved_on_is_not_used():
    for change in ("free", "on", "none"):
        device = Device(ahead=True)
        device.step(planned({1: 2}, {1: 2}), [1])
        if change == "free":
            device.proposals.ahead.forget([1])
        elif change == "on":
            device.proposals.find_ahead(planned({1: 4}, {1: 0}), device.mailbox, None)
        before = device.draft.passes
        device.step(planned({1: 4}, {1: 2}), [0])
        assert device.draft.passes - before == (2 if change == "none" else 4)


def test_what_was_found_goes_where_drafts_of_other_rows_are_found():
    """They lie in the same place, as where a router's rows draft between two steps of a stream."""
    ahead, later = Device(ahead=True), Device(ahead=False)
    for starts, right in (({0: 2}, 1), ({1: 2}, 0), ({0: 4}, 0), ({1: 3}, 2)):
        plan = planned(starts, dict.fromkeys(starts, 3))
        assert ahead.step(plan, [right]) == later.step(plan, [right])


def test_nothing_is_found_beyond_the_longest_sequence():
    device = Device(ahead=True)
    for start, passes in ((POSITIONS - 7, 6), (POSITIONS - 6, 0)):
        before = device.draft.passes
        device.step(planned({0: start}, {0: 3}), [0])
        assert device.draft.passes - before == passes
    assert (device.table[1:] == SLOTS).all()
