"""Models of which some layers keep a state per row, through the engine and by their operation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from support.engines.small_engines import Engine, requests_of
from tokenpod.kernels.mixers import chunked_delta, reference_delta
from tokenpod.kernels.operations.delta_ops import DeltaShape, DeltaStates, DeltaWeights

pytestmark = pytest.mark.compute

TOLERANCE = 1e-4
SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=12, width=4)
ROWS = 5


def states(seed=2):
    generator = torch.Generator().manual_seed(seed)
    return DeltaStates(
        torch.randn(ROWS, SHAPE.channels, SHAPE.width - 1, generator=generator),
        torch.randn(ROWS, 4, 8, 12, generator=generator),
    )


def weights():
    generator = torch.Generator().manual_seed(1)
    return DeltaWeights(
        torch.randn(SHAPE.channels, SHAPE.width, generator=generator) / 2,
        *torch.randn(2, 4, generator=generator),
    )


def inputs(tokens):
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, SHAPE.channels, generator=generator),
        *torch.randn(2, tokens, 4, generator=generator),
    )


def rows_of(counts, rows):
    """What the operation reads of a batch: so many tokens of each of these rows."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    single = sum(count == 1 for count in counts)
    return SimpleNamespace(b_row=rows, b_start=starts, single_rows=single, rows=len(rows))


@pytest.mark.parametrize("counts", [(1,), (1, 1, 130, 9), (64,), (2, 65)], ids=str)
def test_chunks_say_what_one_token_after_the_other_says(counts):
    batch = rows_of(counts, [3, 0, 1, 2][: len(counts)])
    found = []
    for form in (reference_delta, chunked_delta):
        own = states()
        out = form.gated_delta(*inputs(sum(counts)), weights(), SHAPE, own, batch)
        found.append((out, *own))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("cut", [(1, 69), (30, 40), (64, 6), (23, 1, 1, 45)], ids=str)
def test_however_a_text_is_cut_its_state_is_the_same(cut):
    given, whole, parts = inputs(sum(cut)), states(), states()
    expected = chunked_delta.gated_delta(*given, weights(), SHAPE, whole, rows_of((sum(cut),), [2]))
    found, at = [], 0
    for count in cut:
        some = (x[at : at + count] for x in given)
        found.append(
            chunked_delta.gated_delta(*some, weights(), SHAPE, parts, rows_of((count,), [2]))
        )
        at += count
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(parts.memory, whole.memory, rtol=0, atol=5e-6)
    assert torch.equal(parts.inputs, whole.inputs)


def test_other_rows_keep_their_states():
    before, after = states(), states()
    chunked_delta.gated_delta(*inputs(4), weights(), SHAPE, after, rows_of((1, 3), [4, 1]))
    for old, new in zip(before, after, strict=True):
        for row in (0, 2, 3):
            assert torch.equal(old[row], new[row])


@pytest.fixture(scope="module")
def engine(golden):
    return Engine(golden("qwen3-5").folder)


def test_the_engine_says_what_transformers_says(golden, engine, text):
    """Pieces of prompts, rows that join and leave, rows that are preempted and begin anew."""
    checkpoint = golden("qwen3-5")
    prompts = [text(length, seed=length) for length in (37, 5, 6, 40, 1, 12, 17)]
    client = engine.answer(requests_of(prompts, scored=True), preempt=0.04)
    assert not client.failures
    assert engine.preempted > 3
    for i, prompt in enumerate(prompts):
        outputs = client.tokens[i]
        truth = checkpoint.logprobs([*prompt, *outputs[:-1]])
        said = [*client.scored[i], *client.logprobs[i]]
        follow = torch.tensor([*prompt[1:], *outputs])[:, None]
        torch.testing.assert_close(
            torch.tensor(said), truth.gather(1, follow)[:, 0], rtol=0, atol=TOLERANCE
        )
        assert outputs == truth[-len(outputs) :].argmax(-1).tolist()


def test_a_prompt_that_is_asked_twice_is_computed_twice(engine, text):
    """No prefix is shared: its keys and values would be there, and its states would not."""
    prompt = text(30)
    first = engine.answer(requests_of([prompt], scored=False))
    again = engine.answer(requests_of([prompt, prompt], scored=False))
    assert again.tokens[0][: len(first.tokens[0])] == first.tokens[0]
    assert not engine.limits.sharing
