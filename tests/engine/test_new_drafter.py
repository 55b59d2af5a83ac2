"""A source of drafts that nothing knows: one class, given to the scheduler, is all there is."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from support.engines.demo_engine import GREEDY, SAMPLED, Recorder, exact_model, serve
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.sequences.sequence import Sequence

pytestmark = pytest.mark.compute

MOST = 3


class Again:
    """Guesses that what followed the last token before will follow it again."""

    watched = True

    def find(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens behind the last one's latest occurrence before."""
        tokens = sequence.all_tokens(sequence.length).tolist()
        before = [at for at, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        return tokens[before[-1] + 1 :][:most] if before else []

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""


def test_it_saves_steps_and_changes_no_token():
    model = exact_model()
    prompt = [40, 41, 42, 43] * 3
    asked = [
        Request([i], [*prompt, 50 + i], sampling, StoppingParams(new), logprobs=True)
        for i, (sampling, new) in enumerate([(GREEDY, 24), (GREEDY, 20), (SAMPLED, 9)], 1)
    ]
    plain, _ = serve(model, Recorder(asked), rows=4, prefill=64, overlap=False)
    drafts = [msgspec.structs.replace(request, drafts=MOST) for request in asked]
    drafting = partial(Drafting, Again(), MOST)
    link, _ = serve(model, Recorder(drafts), rows=4, prefill=64, overlap=False, drafting=drafting)
    assert link.tokens == plain.tokens
    assert link.logprobs == plain.logprobs
    drafted, accepted = link.drafted
    assert 0 < accepted <= drafted
    assert link.steps < plain.steps
