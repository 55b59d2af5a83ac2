"""Several tokens of constrained rows in a step: forced ones, and drafts. Nothing else changes."""

from __future__ import annotations

import json
from functools import partial

import msgspec
import pytest

from support.engines import constrained
from support.engines.constrained import RANDOM, Client, ask, serve, wait_for_compiling
from support.engines.demo_engine import demo_model, exact_model
from support.engines.guessing import drafting
from tokenpod.core.constraints import Choice, JsonSchema, Regex
from tokenpod.core.outputs import FinishCode
from tokenpod.engine.constraints import masked_steps
from tokenpod.scheduler.drafts.drafting import Drafting, ModelDrafts

pytestmark = pytest.mark.compute

#: Literal texts of bytes that seldom stand together leave a single token at many places.
STAMP = Regex(r"\d-0[1-9]T00:00Z(~\^`){1,2}Q#Q;")
RECORD = JsonSchema(
    json.dumps(
        {
            "type": "object",
            "properties": {"zq": {"const": "#~^Q"}, "n": {"enum": [1, 22]}, "~^": {"type": "null"}},
            "required": ["zq", "n", "~^"],
            "additionalProperties": False,
        }
    )
)
TEXTS = Choice(("Zz~^`|q=0x7F;#~", "Zz~^`|q=0x7F;", "No"))
SAMPLED = {"do_sample": True, "temperature": 0.9}
CUT = {"do_sample": True, "temperature": 1.3, "top_k": 50, "top_p": 0.9}
PENALISED = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3}
REPORTS = {"logprobs": True, "top_n_tokens": 3, "ranks": True}


@pytest.fixture(scope="module", autouse=True)
def _all_begin_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked_steps, "_MOST_BEGINNING", None)
        yield


@pytest.fixture(scope="module")
def exact():
    return exact_model(layers=3)


def requests():
    """Every kind of sampling, what is reported, and ends in the middle of what is forced."""
    marked = {"do_sample": True, "watermark": True, "relative_frequency_penalty": 0.5}
    bad = [constrained.TOKENS.tokens.index(letter) for letter in (b"Q", b"#")]
    stop = {"stop_token_ids": frozenset({2}), "eos_token_ids": frozenset(), "min_new_tokens": 12}
    return [
        ask(1, STAMP, reports=REPORTS),
        ask(2, STAMP, n=3, reports=REPORTS, **SAMPLED),
        ask(5, RECORD, new=30, reports=REPORTS, **CUT),
        ask(6, RECORD, new=30, reports={"logprobs": True}, **PENALISED),
        ask(7, TEXTS, reports=REPORTS | {"top_n_tokens": 0}, **marked),
        ask(8, TEXTS, reports={"top_n_tokens": 2}, top_of_processed=True, **RANDOM),
        *(ask(9 + new, STAMP, new=new, reports={"logprobs": True}) for new in (9, 12)),
        ask(30, STAMP, stopping=stop, reports=REPORTS, **RANDOM),
        ask(31, STAMP, bad_words=[bad], reports={"logprobs": True}),
        ask(32, None, new=12, reports=REPORTS, **SAMPLED),
    ]


def routed():
    made = [ask(41, STAMP, new=20, reports=REPORTS), ask(42, RECORD, new=20, **SAMPLED)]
    return [msgspec.structs.replace(request, drafts=3) for request in made]


SHAPE = {"rows": 17, "slots": 1600, "prefill": 64, "each_turn": wait_for_compiling}


@pytest.fixture(scope="module")
def plain(exact):
    client = serve(exact, Client(requests(), routed()), **SHAPE, forced=0)
    assert client.jumped == 0
    return client


def check(client, plain):
    """Nothing that a client gets to know is different, nor what is counted."""
    assert client.failures == plain.failures
    assert client.tokens == plain.tokens
    assert client.logprobs == plain.logprobs
    assert client.tops_at == plain.tops_at
    assert client.finishes == plain.finishes
    assert client.satisfied == plain.satisfied
    assert client.load.ended == plain.load.ended


@pytest.mark.parametrize(
    ("overlap", "late", "preempt"),
    [
        # Settled at once they are in the test of where that pays, too.
        pytest.param(False, 0.0, 0.0, marks=pytest.mark.slow),
        pytest.param(True, 0.0, 0.0, marks=pytest.mark.slow),
        (True, 0.2, 0.1),
    ],
    ids=["settled at once", "overlapped", "late and preempted"],
)
def test_forced_tokens_change_nothing_but_the_steps(exact, plain, overlap, late, preempt):
    client = serve(
        exact, Client(requests(), routed()), **SHAPE, overlap=overlap, late=late, preempt=preempt
    )
    check(client, plain)
    assert client.load.drafted_tokens == client.load.accepted_tokens == 0
    assert client.jumped > 50
    if not (late or preempt):
        assert client.load.masks.needed == plain.load.masks.needed
        assert client.steps < plain.steps


def test_the_log_probability_of_a_forced_token_is_nought(plain):
    # Of its masked distribution, in which nothing else is left.
    tokens = [constrained.TOKENS.tokens[t] for t in plain.tokens[1]]
    at = tokens.index(b"~")
    assert plain.logprobs[1][at] == 0.0
    assert min(plain.logprobs[1]) < 0.0


def test_a_matrix_has_every_end(plain):
    ends = {sequence: plain.finishes[sequence] for sequence in (1, 21, 30, 31)}
    assert ends == {
        1: FinishCode.EOS,
        21: FinishCode.LENGTH,
        30: FinishCode.STOP_TOKEN,
        31: FinishCode.CONSTRAINT,
    }


def test_a_full_batch_takes_one_token_at_a_time():
    fast = demo_model()
    for rows, jumps in ((3, False), (5, True)):
        client = serve(fast, Client([ask(1, STAMP), ask(2, STAMP, **SAMPLED)]), rows=rows)
        assert (client.jumped > 4) is jumps


@pytest.mark.parametrize("dear", [False, True])
def test_forced_tokens_are_taken_together_where_that_pays(exact, plain, dear):
    def price(plan):
        several = bool((plan.r_samples > 1).any())
        return 1_000_000 * (1 + (9 if dear else 0.2) * several)

    client = serve(exact, Client(requests(), routed()), **SHAPE, price=price)
    check(client, plain)
    # What it costs is found out by trying.
    assert (0 < client.jumped < 20) if dear else (client.jumped > 50)


@pytest.mark.parametrize(
    ("kind", "overlap", "late", "preempt", "forced"),
    [
        ("right", False, 0.0, 0.0, 0),
        ("random", True, 0.2, 0.05, 8),
        pytest.param("wrong", True, 0.0, 0.0, 8, marks=pytest.mark.slow),
    ],
)
def test_drafts_under_masks_change_nothing_either(
    exact, plain, kind, overlap, late, preempt, forced
):
    asked = [
        [msgspec.structs.replace(r, drafts=3) for r in some] for some in (requests(), routed())
    ]
    known = {i: [token for token in tokens if token >= 0] for i, tokens in plain.tokens.items()}
    guesses = drafting(known, kind, 3, constrained.VOCABULARY)
    client = serve(
        exact,
        Client(*asked),
        **SHAPE,
        overlap=overlap,
        late=late,
        preempt=preempt,
        forced=forced,
        drafting=guesses,
    )
    assert client.load.drafted_tokens > 50
    assert (client.load.accepted_tokens > 30) == (kind != "wrong")
    check(client, plain)


def test_a_draft_model_drafts_nothing_for_constrained_rows():
    """Its guesses are not known in time for their masks; the executor here has none to ask."""
    guesses = partial(Drafting, ModelDrafts(), 3)
    asked = [msgspec.structs.replace(ask(1, STAMP), drafts=3)]
    client = serve(demo_model(), Client(asked), drafting=guesses)
    assert client.finishes[1] is FinishCode.EOS
    assert client.load.drafted_tokens == 0
    assert client.jumped > 0
