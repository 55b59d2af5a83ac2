"""The index of n-grams says what a search through the whole text would say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.engines.scheduler_driver import request
from tokenpod.scheduler.drafts.ngrams import NGrams
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.table import Table

TOKENS = st.integers(0, 3) | st.just(262_143)


def sequence(prompt):
    asked = request(1, prompt, max_new_tokens=100)
    return Sequence(asked, 0, np.array(prompt, np.int32), Table())


def searched(tokens, most):
    """What follows the latest occurrence of the last three tokens before, or of the last two."""
    for n in (3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) >= n and tokens[end - n : end] == tokens[-n:]:
                found = tokens[end : end + most]
                return [found[i % len(found)] for i in range(most)]
    return []


@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=20),
    outputs=st.lists(TOKENS, max_size=20),
    asked=st.sets(st.integers(0, 20)),
    most=st.integers(1, 5),
)
def test_the_latest_match_is_continued(prompt, outputs, asked, most):
    source, of = NGrams(), sequence(prompt)
    for at, token in enumerate([*outputs, 0]):
        if at in asked or at == len(outputs):
            assert source.find(of, most) == searched([*prompt, *outputs[:at]], most)
        of.outputs.append(token)


def test_given_embeddings_match_like_tokens():
    """Equal vectors have equal ids, below 0."""
    source, of = NGrams(), sequence([-5, -6, -7, 3, 4, -5, -6, -7])
    assert source.find(of, 2) == [3, 4]
    assert source.find(of, 4) == [3, 4], "a draft is a token that can be drawn"


def test_what_is_over_is_forgotten():
    source, of = NGrams(), sequence([1, 2, 3, 1, 2, 3])
    assert source.find(of, 1) == [1]
    source.forget(of)
    assert not source._indexes
