"""Models of which some layers keep a state per row, through the engine."""

from __future__ import annotations

import pytest
import torch
from small_engines import Engine, requests_of

pytestmark = pytest.mark.compute

TOLERANCE = 1e-4


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
