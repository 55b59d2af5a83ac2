"""Models of which some layers keep a state per row, through the engine."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.engines.guessing import drafting
from support.engines.small_engines import Engine, requests_of
from support.examples import ALL
from tokenpod.scheduler.sequences.work import SnapshotLimits

pytestmark = pytest.mark.compute

TOLERANCE = 1e-4
DRAFTS, VOCABULARY = 4, 96


#: Gated delta nets, short convolutions; slow are decays of a key's numbers, and state spaces apart
#: from attention, with experts of their own layers, beside attention, and without any.
_SPACES = ("granite4", "nemotron-h-moe", "falcon-h1", "codestral-mamba")
KINDS = (
    "qwen3-5",
    "lfm2",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("kimi-linear", *_SPACES)),
)


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(golden, family):
    made = Engine(golden(family).folder, speculate=DRAFTS)
    made.limits = replace(
        made.limits, snapshots=SnapshotLimits(8, made.room.rows + 1, least=4, stride=9)
    )
    return made


def test_the_engine_says_what_transformers_says(golden, family, engine, text):
    """Pieces of prompts, rows that join and leave, rows that are preempted and begin anew."""
    checkpoint = golden(family)
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


def test_a_prompt_that_is_asked_twice_is_computed_once(engine, text):
    """But for its last token, which the state has been through already."""
    prompt = text(30)
    first = engine.answer(requests_of([prompt], scored=False))
    again = engine.answer(requests_of([prompt] * 3, scored=False), one_by_one=True)
    assert again.cached == {0: 0, 1: len(prompt) - 1, 2: len(prompt) - 1}
    for i in range(3):
        n = min(len(again.tokens[i]), len(first.tokens[0]))
        assert again.tokens[i][:n] == first.tokens[0][:n]
        torch.testing.assert_close(
            torch.tensor(again.logprobs[i][:n]),
            torch.tensor(first.logprobs[0][:n]),
            rtol=0,
            atol=TOLERANCE,
        )


def drawn(data, engine, text):
    """Prompts, and how they are served: any budget of a step, any company, cached or not,
    preempted or not.
    """
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=6))
    # Few beginnings, which prompts leave at many places.
    beginnings = [text(50, seed=seed) for seed in (1, 2)]
    prompts = [
        data.draw(st.sampled_from(beginnings))[:length]
        + text(data.draw(st.integers(1, 9)), seed=length)
        for length in lengths
    ]
    snapshots = data.draw(st.sampled_from([0, 1, 3, 8]))
    budget = data.draw(st.integers(1, 16))
    limits = replace(
        engine.limits,
        prefill_tokens=budget,
        snapshots=None
        if not snapshots
        else SnapshotLimits(
            snapshots,
            engine.room.rows + 1,
            least=data.draw(st.sampled_from([1, 4])),
            stride=data.draw(st.sampled_from([3, 100])),
        ),
    )
    return prompts, {
        # A text that is computed token by token would hardly ever end if it began anew that often.
        "preempt": data.draw(st.sampled_from([0.0, 0.1 if budget > 4 else 0.01])),
        "one_by_one": data.draw(st.booleans()),
        "limits": limits,
    }


def any_service(cases, quick):
    return settings(
        max_examples=cases if ALL else quick,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@any_service(60 // len(KINDS), quick=2)
@given(data=st.data())
def test_however_prompts_are_cut_kept_and_joined_tokens_are_the_same(
    golden, family, engine, text, data
):
    prompts, how = drawn(data, engine, text)
    client = engine.answer(requests_of(prompts, scored=False), **how)
    assert not client.failures
    for prompt, outputs in zip(prompts, in_order(client), strict=True):
        assert outputs == said_by(golden(family), prompt, outputs)


@any_service(4, quick=3)
@given(data=st.data())
def test_whatever_is_drafted_tokens_are_the_same(golden, family, engine, text, data):
    """In all of these, and what is cached holds nothing of drafts that were wrong."""
    prompts, how = drawn(data, engine, text)
    asked = requests_of(prompts, scored=False)
    plain = in_order(engine.answer(asked))
    # The same prompts once more, when each has left what it has come to.
    asked += [
        msgspec.structs.replace(x, sequence_ids=[len(asked) + i]) for i, x in enumerate(asked)
    ]
    kind = data.draw(st.sampled_from(["right", "random", "wrong"]))
    guesses = drafting(dict(enumerate(plain * 2)), kind, DRAFTS, VOCABULARY)
    asked = [msgspec.structs.replace(x, drafts=DRAFTS) for x in asked]
    client = engine.answer(asked, drafting=guesses, **how)
    assert not client.failures
    assert client.tried > 0
    assert (client.accepted > 0) == (kind != "wrong")
    assert in_order(client) == plain * 2
    for prompt, outputs in zip(prompts, plain, strict=True):
        assert outputs == said_by(golden(family), prompt, outputs)


def in_order(client):
    return [client.tokens[i] for i in sorted(client.tokens)]


def said_by(checkpoint, prompt, outputs):
    """What transformers says where these outputs were."""
    truth = checkpoint.logprobs([*prompt, *outputs[:-1]])
    return truth[-len(outputs) :].argmax(-1).tolist()
