"""Masks of many texts by one call of the library: the same as those that are made one by one."""

from __future__ import annotations

import pytest
import torch
from constrained import CPU, DEMO, RANDOM, Client, Clock, ask, serve

from tokenpod.core.constraints import Choice, JsonSchema, Regex
from tokenpod.core.outputs import FinishCode
from tokenpod.engine.constraints.guidance import Guidance, GuidanceMatcher
from tokenpod.models import load as loading

KINDS = [
    JsonSchema('{"type": "array", "items": {"enum": ["a", "bc", 3]}, "maxItems": 4}'),
    Regex(r"\d{4}-[01]\d-[0-3]\d"),
    Choice(("yes", "no", "perhaps, perhaps not")),
]


@pytest.fixture(scope="module")
def model():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield loading.load_model(
        DEMO, dtype=torch.float32, device=CPU, progress=lambda done, total: None
    )
    torch.set_num_threads(before)


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
    clock, calls = Clock(), []
    take = GuidanceMatcher.take

    def counted(matcher, token):
        calls.append({matcher})
        take(matcher, token)

    monkeypatch.setattr(GuidanceMatcher, "take", counted)

    class SlowOnce(Guidance):
        slow = None

        def advance(self, taken, threads):
            matchers = {matcher for matcher, _ in taken}
            if self.slow is None:
                SlowOnce.slow = len(calls), matchers
                clock.now += 6_000_000
            calls.append(matchers)
            return super().advance(taken, threads)

    requests = [ask(i, Regex("[ab]{20}"), new=30) for i in range(1, 5)]
    client = serve(model, Client(requests), library=SlowOnce, clock=clock)
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
            words, ends = super().advance(taken, threads)
            Limited.calls += 1
            return words, [None, *ends[1:]] if Limited.calls == 3 else ends

    class Broken(Guidance):
        def advance(self, taken, threads):
            raise BaseException("as a panic of Rust comes")

    requests = [ask(i, Regex("[ab]{20}"), new=30) for i in range(1, 5)]
    ends = list(serve(model, Client(requests), library=Limited).finishes.values())
    assert sorted(ends) == sorted([FinishCode.CONSTRAINT, *[FinishCode.EOS] * 3])
    client = serve(model, Client([*requests, ask(9, None, new=5)]), library=Broken)
    assert [client.finishes[i] for i in range(1, 5)] == [FinishCode.CONSTRAINT] * 4
    assert client.finishes[9] == FinishCode.LENGTH
