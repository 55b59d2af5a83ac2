"""Several samples of rows under masks, drawn at once: the same as round after round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.kernels.interpreted import DEVICE
from support.sampling.samplers import draw, on_device, random_logits, sampled
from tokenpod.core.plan import LAST, UNSAMPLED, PlanRow, plan_of
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.gpu.device_rounds import DeviceDrawing
from tokenpod.engine.steps.executor import StepResult
from tokenpod.engine.steps.mailbox import Staging
from tokenpod.engine.steps.rounds import masked_rounds, masks_there, row_after_row, unmasked_rounds

pytestmark = pytest.mark.compute

VOCAB = 97
#: By row of the plan: drafts, whether it waits for masks, and how many of these come.
ROWS = [(0, True, 1), (0, False, 0), (0, True, 0), (2, True, 3), (1, True, 2), (2, True, 2)]
ROWS += [(1, False, 0), (2, True, 3)]
PARAMS = [SamplingParams(), sampled(temperature=0.7), sampled(top_k=20), sampled(top_p=0.9)] * 2


def behind_the_first(plan, logits, first, sampler, last, *, joined):
    """What is drawn behind each row's first token, but for rows that wait for masks."""
    drawing = DeviceDrawing(
        plan,
        logits,
        plan.sampling,
        first,
        torch.from_numpy(plan.t_token.astype(np.int64)).to(DEVICE),
        sampler=sampler,
        last_token=last,
        accepted=torch.zeros_like(last),
        staging=Staging(DEVICE),
    )
    if not joined:
        drawing._may_join = lambda turns: False
    drawing.draw(unmasked_rounds(plan)[1:])
    return drawing


def drawn(logits, masks, drafts, *, joined, masked=True):
    """What a step comes to, and each row's last token."""
    planned = [
        PlanRow(row, 5, range(9 * row, 9 * row + 1 + n), [LAST, *drafts[row]], samples=1 + n)
        for row, (n, _, _) in enumerate(ROWS)
    ]
    for row, (_, waits, _) in zip(planned, ROWS, strict=True):
        object.__setattr__(row, "masked", waits and masked)
    plan = plan_of(1, planned)
    sampler = on_device([(params, {}) for params in PARAMS * 2], VOCAB)
    last = torch.full((len(PARAMS) * 2 + 1,), 90, device=DEVICE)
    first = None
    if not plan.waits_for_masks:
        rows = torch.tensor(
            [sampler.padding_row if row.masked else row.row for row in planned], device=DEVICE
        )
        positions = torch.zeros_like(rows)
        first = draw(sampler, logits[: len(rows)], rows, positions)
        last[rows[rows < len(last) - 1]] = first.tokens[rows < len(last) - 1]
    drawing = behind_the_first(plan, logits, first, sampler, last, joined=joined)
    if plan.r_masked.any():
        drawing.draw(masked_rounds(plan), masks)
    tokens, logprobs = drawing.drawn.tokens.tolist(), drawing.drawn.logprobs.tolist()
    result = StepResult(tokens, logprobs, tops=[])
    there = masks_there(plan, masks) if masked else {}
    result = row_after_row(plan, result, there)
    return result.tokens, [round(value, 4) for value in result.logprobs], last.tolist()


def some_masks():
    """[n, words] each: many tokens."""
    random = np.random.default_rng(5)
    found = {}
    for row, (_, waits, n) in enumerate(ROWS):
        bits = random.random((n, VOCAB)) < 0.4
        packed = np.packbits(np.pad(bits, ((0, 0), (0, 31))), axis=1, bitorder="little")
        if waits and n:
            found[row] = packed.view(np.int32)
    return found


@pytest.mark.parametrize("masked", [True, False], ids=["under masks", "without"])
def test_rounds_that_are_joined_come_to_the_same_tokens(masked):
    logits = random_logits(sum(1 + n for n, _, _ in ROWS), VOCAB).to(DEVICE)
    masks = some_masks()
    wrong = [[1] * n for n, _, _ in ROWS]
    first, _, _ = drawn(logits, masks, wrong, joined=False, masked=masked)
    ends = np.cumsum([1 + n for n, _, _ in ROWS]).tolist()
    # The first draft of each row is right now, the second of one too.
    drafts = [
        [first[end - n - 1], 1][:n] if first[end - n - 1] >= 0 else [1] * n
        for (n, _, _), end in zip(ROWS, ends, strict=True)
    ]
    apart = drawn(logits, masks, drafts, joined=False, masked=masked)
    together = drawn(logits, masks, drafts, joined=True, masked=masked)
    assert together == apart
    tokens, _, last = apart
    assert tokens.count(UNSAMPLED) >= 3
    for row, ((n, waits, come), end) in enumerate(zip(ROWS, ends, strict=True)):
        counted = [token for token in tokens[end - n - 1 : end] if token >= 0]
        assert last[row] == (counted[-1] if counted else 90)
        assert len(counted) >= min(2, 1 + n, come if waits and masked else 2)


def test_where_all_rows_wait_for_masks_nothing_is_drawn_before(monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROWS", [(2, True, 3), (0, True, 1), (1, True, 1)][::-1])
    logits, masks = random_logits(6, VOCAB).to(DEVICE), some_masks()
    drafts = [[1] * n for n, _, _ in ROWS]
    assert drawn(logits, masks, drafts, joined=True) == drawn(logits, masks, drafts, joined=False)
