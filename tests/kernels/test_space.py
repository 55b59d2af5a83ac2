"""State spaces and short convolutions on a CPU: chunks, cuts and company change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.attention_steps import Spec
from support.kernels.delta_steps import (
    WALKS,
    copied,
    drawn_states,
    one_row,
    step_of,
    walk,
    with_ring,
)
from support.kernels.space_steps import (
    NORMS,
    SMALL,
    SpaceNet,
    convolution_inputs,
    convolution_states,
    drawn_convolution,
    drawn_space,
    space_inputs,
)
from tokenpod.kernels.mixers import chunked_space, reference_space, short_convolution
from tokenpod.kernels.mixers.convolution import plan_recurrent

CHANNELS = 20


class Space:
    """A state space in one of its forms."""

    def __init__(self, form, norm="groups"):
        self.form, self.norm = form, norm

    def states(self, batch):
        return drawn_states(SMALL, batch)

    def inputs(self, tokens):
        return space_inputs(SMALL, tokens)

    def cut(self, given, first, end):
        return type(given)(*(x[first:end] for x in given))

    def run(self, given, states, batch):
        weights = drawn_space(SMALL, norm=self.norm, bias=self.norm != "first")
        return self.form.state_space(given, weights, SMALL, states, plan_recurrent(batch))


class Short:
    """A short convolution in one of its forms."""

    def __init__(self, form, width=3):
        self.form, self.width = form, width

    def states(self, batch):
        return convolution_states(CHANNELS, self.width, batch)

    def inputs(self, tokens):
        return convolution_inputs(CHANNELS, tokens)

    def cut(self, given, first, end):
        return given[first:end]

    def run(self, given, states, batch):
        weights = drawn_convolution(CHANNELS, self.width, bias=self.width != 2)
        return self.form(given, *weights, states, plan_recurrent(batch))


PAIRS = {
    **{norm: (Space(reference_space, norm), Space(chunked_space, norm)) for norm in NORMS},
    **{
        f"convolution-{width}": (
            Short(short_convolution.one_by_one, width),
            Short(short_convolution.short_convolution, width),
        )
        for width in (2, 3)
    },
}
FORMS = {
    f"{name}-{form}": each
    for name in ("groups", "convolution-3")
    for form, each in zip(("plain", "chunked"), PAIRS[name], strict=True)
}


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-5, equal_nan=True)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize(
    "specs",
    [[(1, 1)], [(1, 7), (1, 1), (130, 130), (9, 12)], [(64, 66)], [(2, 2), (65, 300)]],
    ids=str,
)
def test_chunks_say_what_one_token_after_the_other_says(pair, specs):
    batch = step_of([Spec(*each) for each in specs])
    found = []
    for form in pair:
        own = copied(form.states(batch))
        found.append((form.run(form.inputs(batch.tokens), own, batch), *own))
    for expected, got in zip(*found, strict=True):
        close(got, expected)


@pytest.mark.parametrize("cut", [(1, 69), (30, 40), (64, 6), (23, 1, 1, 45)], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_however_a_text_is_cut_its_state_is_the_same(form, cut):
    n = sum(cut)
    given, whole = form.inputs(n), one_row(step_of([Spec(n, n)]), 2)
    first = form.states(whole)
    parts = copied(first)
    expected = form.run(given, first, whole)
    found, at = [], 0
    for count in cut:
        batch = one_row(step_of([Spec(count, at + count)]), 2)
        found.append(form.run(form.cut(given, at, at + count), parts, batch))
        at += count
    close(torch.cat(found), expected)
    for got, wanted in zip(parts, first, strict=True):
        close(got[2], wanted[2])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_other_rows_keep_their_states(form):
    batch = step_of([Spec(1, 5), Spec(3, 6)])
    before = form.states(batch)
    after = copied(before)
    form.run(form.inputs(4), after, batch)
    for old, new in zip(before, after, strict=True):
        for row in set(range(len(old))) - set(batch.b_row):
            torch.testing.assert_close(old[row], new[row], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_position_that_is_computed_again_changes_nothing(form):
    """A row whose mask was late is planned again, by when its memory has been through its token."""
    batch = step_of([Spec(1, 5), Spec(1, 9)])
    states, given = form.states(batch), form.inputs(2)
    first = form.run(given, states, batch)
    kept = copied(states)
    close(form.run(given, states, batch), first)
    for old, new in zip(kept, states, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("steps", WALKS.values(), ids=WALKS)
@pytest.mark.parametrize("form", [reference_space, chunked_space], ids=["reference", "chunked"])
def test_wrong_drafts_leave_nothing(form, steps):
    """What counts is what is found without drafts, and so is what the memory comes to."""
    (found, states), (expected, plain) = walk(SpaceNet(form, SMALL), steps)
    close(found, expected)
    close(states.memory, plain.memory)
    assert torch.equal(states.seen, plain.seen)


@pytest.mark.parametrize("form", [reference_space, chunked_space], ids=["reference", "chunked"])
def test_a_memory_goes_through_no_draft_before_it_is_known(form):
    """A copy of the states between two steps holds whatever is said of the drafts."""
    batch = replace(one_row(step_of([Spec(4, 9)]), 2), b_drafts=[3])
    states = with_ring(drawn_states(SMALL, batch), SMALL, 3, beside=1)
    before, net = copied(states), SpaceNet(form, SMALL)
    net.run(net.inputs(4), states, plan_recurrent(batch))
    torch.testing.assert_close(states.memory, before.memory, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(states.seen, before.seen)
