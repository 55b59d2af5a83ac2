"""Samples round after round, and row after row without those that don't count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenpod.core.plan import UNSAMPLED, PlanRow, plan_of
from tokenpod.engine.steps.executor import StepResult
from tokenpod.engine.steps.rounds import rounds, row_after_row


@st.composite
def steps(draw):
    """A plan, its rows' drafts, what was drawn, by row and place, and how many masks came."""
    rows, drafted, drawn, there, slot = [], [], [], {}, 0
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    for row, samples in enumerate(sorted(counts, key=lambda n: n > 1)):
        tokens = draw(st.lists(st.integers(0, 2), min_size=max(samples, 1), max_size=5))
        drafted.append(tokens[len(tokens) - samples + 1 :] if samples else [])
        drawn.append(draw(st.lists(st.integers(-1, 2), min_size=samples, max_size=samples)))
        if samples and draw(st.booleans()):
            there[row] = draw(st.integers(0, samples - 1))
        slots = range(slot, slot := slot + len(tokens))
        rows.append(PlanRow(row, 9, slots, tokens, samples))
    return plan_of(1, rows), drafted, drawn, there


@given(steps())
def test_a_sample_counts_if_there_is_a_mask_and_all_drafts_before_it_were_drawn(step):
    plan, drafted, drawn, there = step
    at = [
        (row, turn.place) for turn in rounds(plan) for row in turn.rows.tolist()
    ]  # as a device has them
    result = StepResult(
        [drawn[row][place] for row, place in at],
        [row + place / 8 for row, place in at],
        [(i, [i], [0.5]) for i in range(0, len(at), 2)],
        ranks=[1 + place for _, place in at],
    )
    told = row_after_row(plan, result, there)
    if not (there or plan.drafts):
        assert told is result
        return
    expected = []
    for row, tokens in enumerate(drawn):
        for place, token in enumerate(tokens):
            right = tokens[:place] == drafted[row][:place]
            kept = right and place < there.get(row, len(tokens))
            i = at.index((row, place))
            expected.append((token, row + place / 8, 1 + place, i) if kept else None)
    assert told.tokens == [e[0] if e else UNSAMPLED for e in expected]
    assert told.logprobs == [e[1] if e else 0.0 for e in expected]
    assert told.ranks == [e[2] if e else 0 for e in expected]
    assert told.tops == [
        (place, [e[3]], [0.5]) for place, e in enumerate(expected) if e and e[3] % 2 == 0
    ]
