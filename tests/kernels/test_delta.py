"""The gated delta net on a CPU: chunks, cuts and company change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.attention_steps import Spec
from support.kernels.delta_steps import (
    KIMI,
    SMALL,
    WALKS,
    Delta,
    copied,
    drawn_inputs,
    drawn_states,
    drawn_weights,
    one_row,
    run,
    some,
    step_of,
    walk,
    with_ring,
)
from tokenpod.kernels.mixers import chunked_delta, reference_delta

FORMS = (reference_delta, chunked_delta)


@pytest.fixture(params=[SMALL, KIMI], ids=["one decay", "decays of numbers"])
def shape(request):
    return request.param


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize(
    "specs",
    [[(1, 1)], [(1, 7), (1, 1), (130, 130), (9, 12)], [(64, 66)], [(2, 2), (65, 300)]],
    ids=str,
)
def test_chunks_say_what_one_token_after_the_other_says(specs, shape):
    batch = step_of([Spec(*each) for each in specs])
    states = drawn_states(shape, batch)
    given = drawn_inputs(shape, batch.tokens)
    found = []
    for form in FORMS:
        own = copied(states)
        out = run(form, given, drawn_weights(shape), shape, own, batch)
        found.append((out, *own))
    for expected, got in zip(*found, strict=True):
        close(got, expected)


@pytest.mark.parametrize("cut", [(1, 69), (30, 40), (64, 6), (23, 1, 1, 45)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=["reference", "chunked"])
def test_however_a_text_is_cut_its_state_is_the_same(form, cut, shape):
    n, weights = sum(cut), drawn_weights(shape)
    given, whole = drawn_inputs(shape, n), one_row(step_of([Spec(n, n)]), 2)
    first = drawn_states(shape, whole)
    parts = copied(first)
    expected = run(form, given, weights, shape, first, whole)
    found, at = [], 0
    for count in cut:
        batch = one_row(step_of([Spec(count, at + count)]), 2)
        found.append(run(form, some(given, at, at + count), weights, shape, parts, batch))
        at += count
    close(torch.cat(found), expected)
    for got, wanted in zip(parts, first, strict=True):
        close(got[2], wanted[2])


@pytest.mark.parametrize("form", FORMS, ids=["reference", "chunked"])
def test_other_rows_keep_their_states(form, shape):
    batch = step_of([Spec(1, 5), Spec(3, 6)])
    before = drawn_states(shape, batch)
    after = copied(before)
    run(form, drawn_inputs(shape, 4), drawn_weights(shape), shape, after, batch)
    for old, new in zip(before, after, strict=True):
        for row in set(range(len(old))) - set(batch.b_row):
            torch.testing.assert_close(old[row], new[row], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "chunked"])
def test_a_position_that_is_computed_again_changes_nothing(form, shape):
    """A row whose mask was late is planned again, by when its memory has been through its token."""
    batch, weights = step_of([Spec(1, 5), Spec(1, 9)]), drawn_weights(shape)
    states, given = drawn_states(shape, batch), drawn_inputs(shape, 2)
    first = run(form, given, weights, shape, states, batch)
    kept = copied(states)
    again = run(form, given, weights, shape, states, batch)
    close(again, first)
    for old, new in zip(kept, states, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("steps", WALKS.values(), ids=WALKS)
@pytest.mark.parametrize("form", FORMS, ids=["reference", "chunked"])
def test_wrong_drafts_leave_nothing(form, steps, shape):
    """What counts is what is found without drafts, and so is what the memory comes to."""
    (found, states), (expected, plain) = walk(Delta(form, shape), steps)
    close(found, expected)
    close(states.memory, plain.memory)
    assert torch.equal(states.seen, plain.seen)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "chunked"])
def test_a_memory_goes_through_no_draft_and_no_token_before_it_is_known(form, shape):
    """A copy of the states between two steps holds whatever is said of the drafts."""
    batch = replace(one_row(step_of([Spec(4, 9)]), 2), b_drafts=[3])
    states = with_ring(drawn_states(shape, batch), shape, 3)
    before = copied(states)
    run(form, drawn_inputs(shape, 4), drawn_weights(shape), shape, states, batch)
    torch.testing.assert_close(states.memory, before.memory, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(states.seen, before.seen)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "chunked"])
def test_a_token_whose_mask_was_late_may_have_drafts_the_next_time(form, shape):
    """Its memory has been through it already, by itself."""
    weights, given = drawn_weights(shape), drawn_inputs(shape, 4)
    alone = one_row(step_of([Spec(1, 6)]), 2)
    drafted = replace(one_row(step_of([Spec(4, 9)]), 2), b_drafts=[3])
    again = with_ring(drawn_states(shape, alone), shape, 3)
    once = copied(again)
    run(form, some(given, 0, 1), weights, shape, again, alone)
    close(
        run(form, given, weights, shape, again, drafted),
        run(form, given, weights, shape, once, drafted),
    )


def test_numbers_that_are_forgotten_at_once_lie_beside_some_that_stay():
    """What is left of the ones over a chunk is a number that float32 has not."""
    batch, weights = step_of([Spec(70, 70)]), drawn_weights(KIMI)
    weights.shift[::2], weights.shift[1::2] = 60.0, -60.0
    states, given = drawn_states(KIMI, batch), drawn_inputs(KIMI, 70)
    other = copied(states)
    expected = run(reference_delta, given, weights, KIMI, states, batch)
    assert expected.abs().max() > 0.1
    close(run(chunked_delta, given, weights, KIMI, other, batch), expected)
    close(other.memory, states.memory)
