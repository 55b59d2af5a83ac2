"""Masks of many texts by one call of the library: the same as those that are made one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.engines import constrained
from support.engines.constrained import RANDOM, Client, ask, serve
from support.engines.demo_engine import demo_model
from tokenpod.core.constraints import Choice, Grammar, JsonSchema, Regex
from tokenpod.core.outputs import FinishCode
from tokenpod.engine.constraints.guidance import Guidance, GuidanceMatcher

KINDS = [
    JsonSchema('{"type": "array", "items": {"enum": ["a", "bc", 3]}, "maxItems": 4}'),
    Regex(r"\d{4}-[01]\d-[0-3]\d"),
    Choice(("yes", "no", "perhaps, perhaps not")),
]


@pytest.fixture(scope="module")
def model():
    return demo_model()


def asked():
    return [ask(i, KINDS[i % 3], new=24, **RANDOM) for i in range(1, 9)]


class Apart(Guidance):
    def joins(self, matcher):
        return False


def test_tokens_are_the_same_as_with_masks_that_are_made_apart(model):
    sizes = []

    class Together(Guidance):
        def advance(self, taken, threads):
            sizes.append(len(taken))
            return super().advance(taken, threads)

    together = serve(model, Client(asked()), library=Together)
    apart = serve(model, Client(asked()), library=Apart)
    assert max(sizes) > 4
    assert together.tokens == apart.tokens
    assert together.finishes == apart.finishes
    assert together.satisfied == apart.satisfied


def test_texts_that_took_long_together_are_timed_one_by_one_and_then_join_again(model, monkeypatch):
    calls = []
    take = GuidanceMatcher.take

    def counted(matcher, token):
        calls.append({matcher})
        take(matcher, token)

    monkeypatch.setattr(GuidanceMatcher, "take", counted)

    class SlowOnce(Guidance):
        slow = None

        def advance(self, taken, threads):
            matchers = {matcher for matcher, _ in taken}
            made = super().advance(taken, threads)
            if self.slow is None:
                SlowOnce.slow = len(calls), matchers
                made = replace(made, suspects=range(len(taken)))
            calls.append(matchers)
            return made

    requests = [ask(i, Regex("[ab]{20}"), new=30) for i in range(1, 5)]
    client = serve(model, Client(requests), library=SlowOnce)
    assert set(client.finishes.values()) == {FinishCode.EOS}
    at, matchers = SlowOnce.slow
    assert len(matchers) > 1
    for matcher in matchers:
        sizes = [len(each) for each in calls[at:] if matcher in each]
        assert sizes[0] > 1
        assert sizes[1] == 1
        assert max(sizes[2:]) > 1


def test_a_limit_ends_one_text_and_an_error_those_that_were_read_with_it(model):
    class Limited(Guidance):
        calls = 0

        def advance(self, taken, threads):
            made = super().advance(taken, threads)
            Limited.calls += 1
            return replace(made, over=[0]) if Limited.calls == 3 else made

    class Broken(Guidance):
        def advance(self, taken, threads):
            raise BaseException("as a panic of Rust comes")

    requests = [ask(i, Regex("[ab]{20}"), new=30) for i in range(1, 5)]
    ends = list(serve(model, Client(requests), library=Limited).finishes.values())
    assert sorted(ends) == sorted([FinishCode.CONSTRAINT, *[FinishCode.EOS] * 3])
    client = serve(model, Client([*requests, ask(9, None, new=5)]), library=Broken)
    assert [client.finishes[i] for i in range(1, 5)] == [FinishCode.CONSTRAINT] * 4
    assert client.finishes[9] == FinishCode.LENGTH


def walk(heavy, tokens=40):
    """Masks of many texts along random tokens, some by threads of the library, some not."""
    library, random = Guidance(constrained.TOKENS.tokens, [0, 1, 2]), np.random.default_rng(3)
    matchers = [library.compile(kind) for kind in KINDS * 3]
    masks = np.zeros((len(matchers), constrained.VOCABULARY // 32), np.int32)
    ends = [matcher.fill(mask) for matcher, mask in zip(matchers, masks, strict=True)]
    left, found = list(range(len(matchers))), []
    for _ in range(tokens):
        allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        left = [at for at in left if allowed[at].any()]
        taken = [(matchers[at], int(random.choice(np.flatnonzero(allowed[at])))) for at in left]
        for at in left:
            matchers[at].took = heavy(at)
        made = library.advance(taken, 2)
        assert not made.over
        masks[left], ends = made.words, made.ends
        found.append((left, made.words.copy(), ends.tolist()))
    return found


def test_masks_are_the_same_whoever_makes_them():
    alone = walk(lambda at: 0)
    for heavy in (lambda at: 10**6 * (at % 2), lambda at: 10**6):
        for want, got in zip(alone, walk(heavy), strict=True):
            assert want[0] == got[0]
            np.testing.assert_array_equal(want[1], got[1])
            assert want[2] == got[2]


def test_one_that_reaches_a_limit_by_itself_leaves_the_others_theirs():
    library = Guidance(constrained.TOKENS.tokens, [0, 1, 2])
    row = "\n".join(f'r{i}: r{i + 1} "x"?' for i in range(600))
    matchers = [
        library.compile(Regex("y[ab]")),
        library.compile(Grammar(f'start: r0\n{row}\nr600: "y"')),
    ]
    masks = np.zeros((2, constrained.VOCABULARY // 32), np.int32)
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.fill(mask)
    # The first is made by the caller's thread, the second by the library's.
    matchers[1].took = 10**9
    y = constrained.TOKENS.tokens.index(b"y")
    made = library.advance([(matcher, y) for matcher in matchers], 1)
    assert list(made.over) == [1]
    allowed = np.flatnonzero(np.unpackbits(made.words[0].view(np.uint8), bitorder="little"))
    assert {constrained.TOKENS.tokens[token] for token in allowed} == {b"a", b"b"}
