"""Drafts never change a request's tokens, only how many a step brings: through the engine's loop.

With every token computed by itself the outputs are the same bit for bit, whatever is drafted. What
rounding changes on the fast operations is in test_numerics.py.
"""

from __future__ import annotations

import random
from functools import partial

import msgspec
import pytest
import torch

from support.checkpoints.demo import DEMO
from support.engines.demo_engine import (
    CUT,
    GREEDY,
    KINDS,
    PENALISED,
    SAMPLED,
    TOLERANCE,
    VOCABULARY,
    WATERMARKED,
    Recorder,
    exact_model,
    requests,
    routed,
    serve,
)
from support.engines.guessing import drafting
from support.pods.harness import free_port
from support.steps import ranks
from support.steps.ranks import Job
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.scheduler.drafts.drafting import Drafting, ModelDrafts

pytestmark = pytest.mark.compute

MOST = 3


@pytest.fixture(scope="module")
def exact():
    return exact_model()


def drafted(asked, most=MOST):
    return [msgspec.structs.replace(request, drafts=most) for request in asked]


@pytest.fixture(scope="module")
def undrafted(exact):
    link, _ = serve(exact, Recorder(requests(), routed()), rows=17, prefill=64, overlap=False)
    return link


@pytest.mark.parametrize(
    ("kind", "overlap", "preempt"),
    [
        ("right", True, 0.0),
        ("random", True, 0.05),
        ("random", False, 0.0),
        pytest.param("wrong", True, 0.0, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_bit_by_bit_with_and_without_drafts(
    exact, undrafted, kind, overlap, preempt
):
    guesses = drafting(undrafted.tokens, kind, MOST, VOCABULARY)
    link = Recorder(drafted(requests()), drafted(routed()))
    got, _ = serve(
        exact, link, rows=12, prefill=16, overlap=overlap, preempt=preempt, drafting=guesses
    )
    assert got.tokens == undrafted.tokens
    assert got.logprobs == undrafted.logprobs
    assert got.tops == undrafted.tops
    assert got.scored == undrafted.scored != {}
    tried, accepted = got.drafted
    assert tried > 50
    assert got.drafted == tuple(sum(got.drafts.values()))
    assert (accepted > 0) == (kind != "wrong")


class Worse:
    """A draft model: the served one, but that its logits are off by something."""

    def __init__(self, model, off):
        self._model = model
        noise = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
        self._noise = noise * off

    def forward(self, batch, kv):
        return self._model.forward(batch, kv)

    def logits(self, hidden, step):
        return self._model.logits(hidden, step) + self._noise


@pytest.mark.parametrize(
    ("off", "overlap", "preempt", "least", "most"),
    [
        (0.0, False, 0.0, 0.7, 1.0),
        (1.0, True, 0.05, 0.2, 0.9),
    ],
    ids=["the same model", "another"],
)
def test_a_draft_model_changes_nothing_but_the_number_of_steps(
    exact, undrafted, off, overlap, preempt, least, most
):
    link = Recorder(drafted(requests()), drafted(routed()))
    got, _ = serve(
        exact,
        link,
        rows=12,
        prefill=16,
        overlap=overlap,
        preempt=preempt,
        drafting=partial(Drafting, ModelDrafts(), MOST),
        draft=Worse(exact, off),
    )
    assert got.tokens == undrafted.tokens
    assert got.logprobs == undrafted.logprobs
    assert got.tops == undrafted.tops
    tried, accepted = got.drafted
    assert tried > 50
    assert least <= accepted / tried <= most


@pytest.mark.sampled(2, "slow", by_turns=True)
@pytest.mark.parametrize("sampling", KINDS, ids=["greedy", "sampled", "cut", "penalised", "marked"])
def test_a_draft_model_that_is_the_served_one_draws_what_that_draws(exact, sampling):
    """Drafts have the noise of the tokens, so that all are right, but for what a penalty knows."""
    asked = drafted([Request([1], [900, 40, 77], sampling, StoppingParams(41), logprobs=True)])
    guesses = partial(Drafting, ModelDrafts(), MOST)
    shape = {"rows": 2, "prefill": 8, "overlap": False, "slots": 64}
    link, _ = serve(exact, Recorder(asked), drafting=guesses, draft=exact, **shape)
    tried, accepted = link.drafted
    assert tried >= 30
    if sampling in (PENALISED, WATERMARKED):
        assert 0 < accepted <= tried
    else:
        assert accepted == tried


def test_keys_and_values_of_a_draft_model_are_those_of_a_prompt_found_in_the_cache(exact):
    """Another's prompt is the prefix: if the draft model lacked its keys, drafts would be wrong."""
    chance = random.Random(7)
    prompt = [chance.randrange(3, VOCABULARY) for _ in range(40)]

    class After(Recorder):
        """Asks a second time once the first is answered."""

        def receive(self, seconds):
            if self.finished == {1} and not self.inbox and 2 not in self.started:
                self.inbox += drafted([Request([2], [*prompt, 9], SAMPLED, StoppingParams(13))])
            return super().receive(seconds)

    link = After(drafted([Request([1], prompt, SAMPLED, StoppingParams(13))]))
    link.requests[2] = None
    guesses = partial(Drafting, ModelDrafts(), MOST)
    serve(exact, link, rows=2, prefill=64, overlap=False, slots=128, drafting=guesses, draft=exact)
    assert link.load.cached_tokens > 30
    tried, accepted = link.drafted
    assert tried == accepted > 10


def outputs(exact, sampling, stopping, known=None, most=4, **more):
    """One request's tokens, and those drafted and accepted, with right drafts if it is known."""
    asked = [Request([1], [900, 40, 77], sampling, stopping, logprobs=True, drafts=most, **more)]
    guesses = drafting({1: known}, "right", most, VOCABULARY) if known else None
    link, _ = serve(
        exact, Recorder(asked), rows=2, prefill=8, overlap=False, slots=64, drafting=guesses
    )
    return link


@pytest.mark.sampled(2, "slow", by_turns=True)
@pytest.mark.parametrize("sampling", KINDS, ids=["greedy", "sampled", "cut", "penalised", "marked"])
def test_nothing_is_left_of_what_was_accepted_behind_an_end(exact, sampling):
    known = outputs(exact, sampling, StoppingParams(14)).tokens[1]
    # A token that has not occurred before ends the sequence there.
    for at in [i for i in range(3, 13) if known[i] not in known[:i]][:2]:
        for stopping in (
            StoppingParams(14, eos_token_ids=frozenset({known[at]})),
            StoppingParams(14, stop_token_ids=frozenset({known[at]})),
            StoppingParams(at + 1),
        ):
            link = outputs(exact, sampling, stopping, known)
            assert link.tokens[1] == known[: at + 1]
            assert len(link.logprobs[1]) == at + 1
            tried, accepted = link.drafted
            # The first token comes with the prompt; each step then brings one that is no draft,
            # but for a last one that ended with a draft.
            assert at <= accepted + link.steps - 1 <= at + 1
            assert tried <= 4 * (link.steps - 1)
            assert link.steps < at


def test_ends_that_must_not_come_yet_are_not_drawn_behind_drafts_either(exact):
    known = outputs(exact, GREEDY, StoppingParams(14)).tokens[1]
    for least in (2, 5, 9):
        stopping = StoppingParams(14, min_new_tokens=least, stop_token_ids=frozenset(known))
        plain = outputs(exact, GREEDY, stopping)
        assert len(plain.tokens[1]) > least
        for guess in (known, plain.tokens[1]):
            link = outputs(exact, GREEDY, stopping, guess)
            assert link.tokens == plain.tokens
            assert link.logprobs == plain.logprobs


def test_as_many_tokens_are_drafted_as_the_bound_allows(exact):
    known = outputs(exact, SAMPLED, StoppingParams(7)).tokens[1]
    link = outputs(exact, SAMPLED, StoppingParams(7), known, most=40)
    assert link.tokens[1] == known
    # The prompt's step brings one token, the other one five drafts and the token behind them.
    assert (link.steps, link.drafted) == (2, (5, 5))


def test_a_router_gets_no_drafts_beyond_what_it_has_reserved(exact):
    """Its rows' bounds are all that admission has counted."""
    known = outputs(exact, SAMPLED, StoppingParams(7)).tokens[1]
    asked = Request([1], [900, 40, 77], SAMPLED, StoppingParams(7), logprobs=True, drafts=40)
    link, _ = serve(
        exact,
        Recorder([], [asked]),
        rows=2,
        prefill=8,
        overlap=False,
        slots=16 + 3 + 7 - 1,  # 16 are kept for liveness probes; the last token needs none
        drafting=drafting({1: known}, "right", 40, VOCABULARY),
    )
    assert link.tokens[1] == known
    assert link.drafted == (5, 5)


# -- ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "right", "wrong"])
@pytest.mark.sampled(3, "slow")
@pytest.mark.pod
def test_two_ranks_draft_as_one_does(kind):
    """Greedy, sampled and penalised rows that end by length, at an end of text, at a stop token."""
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cpu",
        threads=1,
        max_batch_size=6,
        max_batch_prefill_tokens=16,
        max_total_tokens=80,
    )
    prompts = [list(range(5, 30)), list(range(50, 61)), list(range(70, 73))]

    def requests(*ends):
        stops = [StoppingParams(12, **end) for end in ends]
        return [
            Request([1], prompts[0], GREEDY, stops[0], logprobs=True),
            Request([2, 3], prompts[1], CUT, stops[1], logprobs=True),
            Request([4], prompts[2], PENALISED, stops[2], logprobs=True),
        ]

    long = ranks.answer(DEMO, requests({}, {}, {}), options, dtype="float32").tokens
    asked = requests(
        {"eos_token_ids": frozenset({long[1][7]})}, {"stop_token_ids": frozenset({long[3][8]})}, {}
    )
    alone = ranks.answer(DEMO, asked, options, dtype="float32")
    assert min(map(len, alone.tokens.values())) < 12
    port = free_port()
    jobs = [
        Job(
            rank,
            [(2, port, [str(DEMO)])],
            drafted(asked),
            options,
            dtype="float32",
            preempt=0.05,
            # Right beyond the ends too, so that something is accepted there.
            expected=long,
            guesses=kind,
            drafts=MOST,
        )
        for rank in range(2)
    ]
    leader, follower = (said[0][0] for said in ranks.run(jobs))
    assert (leader.drafted[1] > 10) == (kind != "wrong")
    assert leader.drafted[0] > 20
    assert leader.drafted == follower.drafted
    assert leader.tokens == follower.tokens == dict(alone.tokens)
    for sequence, logprobs in alone.logprobs.items():
        assert leader.logprobs[sequence] == pytest.approx(logprobs, abs=TOLERANCE)
