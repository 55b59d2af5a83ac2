"""Constrained sequences through the engine's loop: texts conform, and lateness shows nowhere."""

from __future__ import annotations

import json
import random
import re
import threading
import time

import jsonschema
import msgspec
import numpy as np
import pytest

from support.engines import constrained
from support.engines.constrained import END, RANDOM, Client, Clock, ask, serve, wait_for_compiling
from support.engines.demo_engine import demo_model, exact_model
from tokenpod.core.constraints import Choice, ConstraintLimits, Grammar, JsonSchema, Regex
from tokenpod.core.messages import Vocabulary
from tokenpod.core.outputs import FailureCode, FinishCode
from tokenpod.engine.constraints import cache, guidance_matcher, masked_steps
from tokenpod.engine.constraints.guidance import Guidance, GuidanceMatcher
from tokenpod.engine.constraints.library import LimitReached

pytestmark = pytest.mark.compute

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATE = r"\d{4}-[01]\d-[0-3]\d"
KINDS = [JsonSchema(json.dumps(PERSON)), Regex(DATE), Choice(("yes", "no", "perhaps")), None]


@pytest.fixture(scope="module")
def model():
    return demo_model()


@pytest.fixture(scope="module")
def exact():
    return exact_model()


@pytest.fixture(scope="module")
def undisturbed(exact):
    return serve(exact, Client(mixed_requests()), rows=17, prefill=64)


def mixed_requests(longer=0):
    made = [ask(i + 1, KINDS[i % 4], new=24 + longer, **RANDOM) for i in range(5)]
    return [*made, ask(11, KINDS[0], n=3, new=30 + longer, **RANDOM), ask(21, KINDS[1], new=20)]


def test_what_random_choices_write_conforms(model):
    client = serve(model, Client(mixed_requests(longer=40)), overlap=False)
    assert not client.failures
    for sequence, finish in client.finishes.items():
        kind = KINDS[(sequence - 1) % 4] if sequence < 11 else KINDS[0 if sequence < 21 else 1]
        if kind is None:
            assert sequence not in client.satisfied
            continue
        assert client.satisfied[sequence] == (finish is FinishCode.EOS), client.text(sequence)
        if finish is not FinishCode.EOS:
            continue
        match kind:
            case JsonSchema():
                jsonschema.validate(json.loads(client.text(sequence)), PERSON)
            case Regex():
                assert re.fullmatch(DATE, client.text(sequence))
            case Choice():
                assert client.text(sequence) in kind.texts
    ends = [finish for sequence, finish in client.finishes.items() if sequence in client.satisfied]
    assert ends.count(FinishCode.EOS) >= 4


@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
@pytest.mark.parametrize(("late", "preempt"), [(0.3, 0.0), (0.2, 0.1)])
@pytest.mark.sampled(3, "slow")
def test_late_masks_and_preemptions_change_no_token(exact, undisturbed, overlap, late, preempt):
    client = serve(
        exact, Client(mixed_requests()), overlap=overlap, late=late, preempt=preempt, prefill=8
    )
    assert client.tokens == undisturbed.tokens
    assert client.finishes == undisturbed.finishes
    assert client.satisfied == undisturbed.satisfied
    assert client.load.masks.needed > 0
    assert (client.load.preemptions > 0) == (preempt > 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
def test_a_routers_sequences_wait_for_masks_and_lose_no_token(exact, overlap):
    asked = [ask(1, KINDS[0], new=20, **RANDOM), ask(2, None, new=9), ask(3, KINDS[1], new=20)]
    want = serve(exact, Client(routed=asked), rows=17)
    assert want.finishes[3] is FinishCode.EOS
    got = serve(exact, Client(routed=asked), overlap=overlap, late=0.4)
    assert got.tokens == want.tokens
    assert got.finishes == want.finishes
    # Only the sequences that were late are left out of an answer; one is never empty.
    assert got.empty_decodes == 0


def test_a_constraint_that_is_refused_fails_its_request_alone(model):
    bad = [
        (Regex("(?=a)b"), "look-ahead"),
        (JsonSchema('{"not": {}}'), "not"),
        (JsonSchema('{"type": "integer", "minimum": 5, "maximum": 3}'), "greater than maximum"),
        (Grammar("start: nothing"), "nothing"),
        (Grammar('%llguidance {}\nstart: "a"'), "%llguidance"),
    ]
    asked = [ask(i + 1, constraint) for i, (constraint, _) in enumerate(bad)]
    client = serve(model, Client([*asked, ask(9, None, new=5)]))
    assert client.finishes == {9: FinishCode.LENGTH}
    for i, (_, problem) in enumerate(bad):
        assert problem in client.failures[i + 1], client.failures[i + 1]
    assert client.load.masks.refused == len(bad)


def test_a_routers_refused_request_is_told_when_the_router_asks_for_it(model):
    asked = [ask(1, Regex("(")), ask(2, Regex("[ab]{3}"), new=9)]
    client = serve(model, Client(routed=asked))
    assert "unclosed group" in client.failures[1]
    assert client.finishes == {2: FinishCode.EOS}
    assert re.fullmatch("[ab]{3}", client.text(2))


def test_a_text_ends_where_nothing_more_is_allowed(model):
    # Without end tokens the only way to end is that nothing is left.
    never = ask(1, Regex("[ab]{5}"), stopping={"eos_token_ids": frozenset()}, **RANDOM)
    # `Ġ` is no token of these texts: nothing of what is allowed conforms after the first token.
    stuck = ask(2, Regex("a+b"), allowed_token_ids=[constrained.TOKENS.tokens.index(b"a")], new=9)
    client = serve(model, Client([never, stuck]))
    assert client.finishes == {1: FinishCode.CONSTRAINT, 2: FinishCode.LENGTH}
    assert client.satisfied == {1: True, 2: False}
    assert re.fullmatch("[ab]{5}", client.text(1))
    first = serve(model, Client([ask(1, Regex("b"), allowed_token_ids=[END])]))
    assert "no token can begin" in first.failures[1]


def test_bad_words_that_leave_nothing_end_a_text_and_are_no_fault_of_the_model(model):
    letters = [constrained.TOKENS.tokens.index(letter) for letter in (b"a", b"b")]
    asked = ask(1, Regex("a[ab]"), bad_words=[[letters[0], letter] for letter in letters], new=9)
    only = {"allowed_token_ids": [*letters, END]}
    asked = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, **only))
    client = serve(model, Client([asked]), overlap=True)
    assert client.finishes == {1: FinishCode.CONSTRAINT}
    assert client.satisfied == {1: False}
    assert client.text(1) == "a"


def test_an_end_is_drawn_only_where_the_grammar_allows_one_and_not_too_early(model):
    stopping = {"min_new_tokens": 6, "stop_token_ids": frozenset({2})}
    asked = [ask(i, Regex("a{1,30}"), new=40, stopping=stopping, **RANDOM) for i in range(1, 7)]
    client = serve(model, Client(asked))
    for sequence in range(1, 7):
        tokens = client.tokens[sequence]
        if client.finishes[sequence] in (FinishCode.EOS, FinishCode.STOP_TOKEN):
            assert len(tokens) > 6
            assert tokens[-1] in (END, 2)
            assert client.satisfied[sequence]
        assert set(client.text(sequence).replace("<|pad|>", "")) == {"a"}
    assert {FinishCode.EOS, FinishCode.STOP_TOKEN} <= {*client.finishes.values()}


class SlowMatcher(GuidanceMatcher):
    """Of a kind of its own, so that its masks are made alone."""

    def copy(self):
        return type(self)(self._matcher.deep_copy(), self._vocab)


class SlowLibrary(Guidance):
    """Choices are slow."""

    matcher = SlowMatcher

    def compile(self, constraint):
        made = super().compile(constraint)
        return self.matcher(made._matcher, self._vocab) if isinstance(constraint, Choice) else made


def test_a_slow_row_is_late_and_the_others_go_on(model):
    turns = threading.Semaphore(0)

    class Slow(SlowMatcher):
        def take(self, token):
            # Two turns must pass, however slow the machine is.
            for _ in range(2):
                assert turns.acquire(timeout=60)
            super().take(token)

    class Library(SlowLibrary):
        matcher = Slow

    def hurry(loop):
        loop.masked._usual_ns = 1e6  # masks may take 0.1 ms beyond the forward
        turns.release()

    asked = [ask(1, Choice(("a" * 60,)), new=70), ask(2, None, new=200)]
    client = serve(model, Client(asked), library=Library, each_turn=hurry)
    assert client.text(1) == "a" * 60
    assert client.load.masks.late > 0
    # While one row was at its first tokens, the other got as many as its steps had.
    assert len(client.tokens[2]) == 200


def test_a_mask_that_takes_too_long_ends_that_sample_alone(model):
    clock, begun, over = Clock(), threading.Event(), threading.Event()

    class Slow(SlowMatcher):
        def take(self, token):
            begun.set()
            assert over.wait(60)
            super().take(token)

    class Library(SlowLibrary):
        matcher = Slow

    def hurry(loop):
        loop.masked._usual_ns = 1e6
        if begun.is_set() and not over.is_set():
            # The only worker is at this mask, so no other one is being made.
            clock.now += 30_000_000
        if client.finishes:
            over.set()

    limits = ConstraintLimits(workers=1, mask_seconds=0.05)
    client = Client([ask(1, Choice(("a" * 60,)), new=70), ask(2, Regex("[ab]{20}"), new=40)])
    serve(model, client, library=Library, limits=limits, each_turn=hurry, clock=clock)
    assert client.finishes == {1: FinishCode.CONSTRAINT, 2: FinishCode.EOS}
    assert client.satisfied == {1: False, 2: True}


def test_a_limit_of_the_library_ends_that_sample_alone(model):
    class Limited(SlowMatcher):
        def take(self, token):
            raise LimitReached("a limit")

    class Library(SlowLibrary):
        matcher = Limited

    asked = [ask(1, Choice(("a" * 60,)), new=70), ask(2, Regex("[ab]{20}"), new=40)]
    client = serve(model, Client(asked), library=Library)
    assert client.finishes == {1: FinishCode.CONSTRAINT, 2: FinishCode.EOS}
    assert client.satisfied == {1: False, 2: True}


def test_one_that_takes_too_long_to_compile_is_refused(model):
    clock, over = Clock(), threading.Event()

    class Library(SlowLibrary):
        def compile(self, constraint):
            assert over.wait(60)
            return super().compile(constraint)

    def pass_time(loop):
        clock.now += 30_000_000
        if client.failures:
            over.set()

    limits = ConstraintLimits(workers=1, compile_seconds=0.05)
    client = Client([ask(1, Choice(("a",)))])
    serve(model, client, library=Library, limits=limits, each_turn=pass_time, clock=clock)
    assert "takes more than 0.05 s" in client.failures[1]


def test_aborted_requests_leave_nothing(model):
    asked = [ask(i, KINDS[(i - 1) % 4], new=60, **RANDOM) for i in range(1, 9)]
    client, chance = Client(asked), random.Random(4)

    def abort(loop):
        if chance.random() < 0.3 and client.left:
            sequence = chance.choice(sorted(client.left))
            loop.scheduler.abort([sequence])
            loop.masked.forget([sequence])
            client.left.discard(sequence)

    serve(model, client, overlap=True, late=0.2, each_turn=abort)


def test_compiled_constraints_are_cached_by_content(model):
    asked = [ask(i, JsonSchema(json.dumps(PERSON)), new=3) for i in range(1, 6)]
    client = serve(model, Client(asked))
    assert client.load.masks.cached + client.load.masks.compiled == 5
    # Two texts share one that is compiled; two threads may compile the same one at once.
    assert client.load.masks.compiled <= 4


def test_requests_that_are_compiled_at_once_begin_a_few_at_a_time_beside_others(model, monkeypatch):
    monkeypatch.setattr(masked_steps, "_MOST_BEGINNING", 4)
    go_on, waiting = threading.Event(), []

    class Library(Guidance):
        def compile(self, constraint):
            assert go_on.wait(60)
            return super().compile(constraint)

    def let_compile(loop):
        waiting.append(len(loop.scheduler._constrained.held))
        if len(client.tokens[1]) == 3:
            go_on.set()
            wait_for_compiling(loop)

    asked = [ask(i, Regex("[ab]{3}"), new=5) for i in range(2, 12)]
    client = Client([ask(1, None, new=30), *asked])
    serve(model, client, library=Library, each_turn=let_compile, rows=13, slots=2000)
    left = [n for at, n in enumerate(waiting) if not at or n != waiting[at - 1]]
    assert left == [10, 6, 2, 0]
    assert {client.finishes[i] for i in range(2, 12)} == {FinishCode.EOS}


def test_a_few_texts_share_a_compiled_constraint(monkeypatch):
    class Made:
        words, prepared = np.zeros(4, np.int32), ""

    made = [Made() for _ in range(9)]
    store, many = cache.CompileCache(10**7), Regex("a")
    found = [store.get(many, lambda before: made[store.misses]) for _ in range(9)]
    assert found == [made[i] for i in (1, 1, 2, 2, 3, 3, 4, 4, 5)]
    assert (store.hits, store.misses) == (4, 5)
    # One that takes long is compiled once.
    monkeypatch.setattr(cache, "_DEAR_NS", -1)
    dear = [store.get(Regex("b"), lambda before: made[store.misses], 3) for _ in range(9)]
    assert dear == [made[6]] * 9


def test_what_was_not_used_for_longest_is_forgotten_once_the_bytes_are_over():
    class Made:
        words, prepared = np.zeros(4, np.int32), ""

    store = cache.CompileCache(2 * cache._BASE_BYTES + 10_000)
    for name in "abac":
        store.get(Regex(name), lambda before: Made())
    assert (store.hits, store.misses) == (1, 3)
    store.get(Regex("b"), lambda before: Made())
    assert (store.hits, store.misses) == (1, 4)
    # One that is larger than all of it is not kept at all.
    big = Regex("a" * 10_000)
    for _ in range(2):
        store.get(big, lambda before: Made())
    assert (store.hits, store.misses) == (1, 6)


def test_matchers_whose_texts_are_over_are_kept_while_there_is_room():
    class Made:
        words, prepared = np.zeros(4, np.int32), ""

    made, kind = Made(), Regex("a")
    store = cache.CompileCache(3 * cache._USED_BYTES)
    # Nobody compiled it, or it is forgotten.
    store.give_back(kind, "of nobody")
    assert store.used(kind) is None
    store.get(kind, lambda before: made)
    for matcher in ("first", "second", "too many"):
        store.give_back(kind, matcher)
    assert [store.used(kind) for _ in range(3)] == [(made, "second"), (made, "first"), None]
    assert (store.hits, store.misses) == (2, 1)
    # They stay when it is compiled again, and go when it is forgotten.
    for _ in range(2):
        store.get(kind, lambda before: made)
        store.give_back(kind, "third")
    assert store.used(kind) == (made, "third")
    for name in "bcdefghij":
        store.get(Regex(name), lambda before: made)
    assert store.used(kind) is None
    assert store._bytes == sum(entry.nbytes for entry in store._entries.values()) <= store._most


def test_a_matcher_that_begins_again_allows_what_a_new_one_does():
    library = Guidance(constrained.TOKENS.tokens, constrained.TOKENS.special)
    matcher, draw = library.compile(KINDS[0]), random.Random(3)
    words, others = (np.zeros(-(-len(constrained.TOKENS.tokens) // 32), np.int32) for _ in range(2))
    texts = 1
    while True:
        fresh = library.compile(KINDS[0])
        for _ in range(12):
            assert matcher.fill(words) == fresh.fill(others)
            assert (words == others).all()
            some = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            token = draw.choice(some)
            matcher.take(token)
            fresh.take(token)
        if not matcher.begin_again():
            break
        texts += 1
    assert texts == guidance_matcher._MOST_TEXTS
    # One whose text has failed is of no use.
    with pytest.raises(LimitReached):
        fresh.take(constrained.TOKENS.tokens.index(b"}"))
    assert not fresh.begin_again()


def test_a_constraint_that_comes_again_is_not_compiled_again(model):
    compiled, kind = [], Regex("[0-9]{4}-[ab]{3}")

    class Library(Guidance):
        def compile(self, constraint):
            compiled.append(constraint)
            return super().compile(constraint)

    class OneByOne(Client):
        def receive(self, seconds):
            nobody = len(self.inbox) >= len(self.left)
            n = nobody + (len(self.inbox) > len(self.left))
            messages, self.inbox = self.inbox[:n], self.inbox[n:]
            return messages

    def let_it_come_back(loop):
        store = loop.masked._masks._compiler.cache
        while (
            client.left and len(client.inbox) == len(client.left) and not store._entries[kind].used
        ):
            time.sleep(0.001)

    client = OneByOne([ask(i, kind, new=20, **RANDOM) for i in range(1, 9)])
    serve(model, client, library=Library, each_turn=let_it_come_back)
    texts = [client.text(i) for i in range(1, 9)]
    assert len({*texts}) > 4
    assert all(re.fullmatch(kind.pattern, text) for text in texts), (texts, client.finishes)
    assert compiled == [kind]


def test_a_vocabulary_that_the_library_can_not_take_refuses_constraints_alone(model):
    class Library(Guidance):
        def __init__(self, tokens, special):
            raise BaseException("as a panic of Rust comes")

    client = serve(model, Client([ask(1, KINDS[1]), ask(2, None, new=4)]), library=Library)
    assert "vocabulary" in client.failures[1]
    assert client.finishes == {2: FinishCode.LENGTH}


@pytest.mark.parametrize("moment", ["compile", "fill"])
def test_an_exception_that_nobody_foresaw_fails_its_request_alone(model, caplog, moment):
    """Under an id that its client gets, and the log has; beside others, also a router's."""

    class Broken(GuidanceMatcher):
        def fill(self, words):
            raise ZeroDivisionError

    class Library(Guidance):
        def compile(self, constraint, prepared=""):
            if moment == "compile" and constraint == Regex("[ab]{9}"):
                raise ZeroDivisionError
            made = super().compile(constraint, prepared)
            if moment == "fill" and constraint == Regex("[ab]{9}"):
                made.copy = lambda: Broken(made.library.deep_copy(), constrained.VOCABULARY)
            return made

    bad, good = Regex("[ab]{9}"), Regex("[cd]{9}")
    mine, routed = [ask(1, bad), ask(2, good)], [ask(3, bad), ask(4, good), ask(5, None, new=9)]
    client = serve(model, Client(mine, routed), library=Library)
    assert client.codes == {1: FailureCode.INTERNAL, 3: FailureCode.INTERNAL}
    ids = {record.message.removeprefix("internal error ") for record in caplog.records}
    assert {*client.failures.values()} == ids
    assert len(ids) == 2
    assert re.fullmatch("[cd]{9}", client.text(2))
    assert re.fullmatch("[cd]{9}", client.text(4))
    assert client.finishes[5] == FinishCode.LENGTH


def test_tokens_of_more_bytes_than_the_library_takes_are_never_drawn(model):
    tokens = [*constrained.TOKENS.tokens]
    tokens[3000] = b"a" * 300
    client = Client([ask(1, Regex("a*"), new=20)], vocabulary=Vocabulary(tokens, [0, 1, 2]))
    serve(model, client)
    assert 3000 not in client.tokens[1]
    assert set(client.text(1)) <= {"a"}
