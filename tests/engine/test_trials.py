"""What takes the library minutes, or lets its stack overflow, ends in a process of its own."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from support.engines import constrained
from support.engines.constrained import RANDOM, Client, ask, serve
from support.engines.demo_engine import demo_model
from support.pods.harness import children_of
from tokenpod.core.constraints import Choice, ConstraintLimits, Grammar, JsonSchema, Regex, Tagged
from tokenpod.core.outputs import FinishCode
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.library import Fault, LimitReached, Lost, Refused
from tokenpod.engine.constraints.trial import TooLong
from tokenpod.engine.constraints.trials import Trials

pytestmark = pytest.mark.pod


def schema(value: object) -> JsonSchema:
    return JsonSchema(json.dumps(value))


#: Its automata have the product of these numbers of states: minutes in 140 bytes.
ENDLESS = schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 101, 103)]})
#: Each rule names the next one.
ROW = 3000
DEEP = [
    schema(
        {
            "$ref": "#/$defs/0",
            "$defs": {
                str(i): {"type": "array", "items": {"$ref": f"#/$defs/{(i + 1) % ROW}"}}
                for i in range(ROW)
            },
        }
    ),
    Grammar(
        "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "x"?' for i in range(ROW)) + f'\nr{ROW}: "y"'
    ),
]


@pytest.fixture(scope="module")
def trials():
    return Trials(constrained.TOKENS.tokens, constrained.TOKENS.special, 1)


@pytest.mark.parametrize("deep", DEEP, ids=["schema", "grammar"])
def test_a_stack_that_overflows_is_a_refusal(trials, deep):
    with pytest.raises(Refused, match="nested too deeply, or name each other in too long a row"):
        trials.try_first(deep, 60)
    assert trials.try_first(Regex("a"), 60)


def test_one_that_takes_too_long_is_stopped(trials):
    with pytest.raises(TooLong):
        trials.try_first(ENDLESS, 0.2)
    assert trials.try_first(Regex("a"), 60)


def test_one_that_could_not_be_started_is_started_for_the_next_constraint(monkeypatch):
    trials = Trials(constrained.TOKENS.tokens, constrained.TOKENS.special, 1)
    with monkeypatch.context() as patch:
        patch.setattr("tokenpod.engine.constraints.trials._COMMAND", ("/no/such/program",))
        with pytest.raises(Lost):
            trials.try_first(Regex("a"), 60)
    assert trials.try_first(Regex("a"), 60)


#: A worker in which something that nobody foresaw happens to one constraint.
BROKEN = """
import sys
from tokenpod.engine.constraints import guidance, trial
def grammar_of(constraint, special, real=guidance.grammar_of):
    return real(constraint, special) if constraint.pattern != "bad" else 1 / 0
guidance.grammar_of = grammar_of
sys.exit(trial.main())
"""


#: Workers that are killed while they compile some constraints: one of them, or each.
KILLED = """
import os, signal, sys
from tokenpod.engine.constraints import guidance, trial
first = os.pipe()
os.write(first[1], b"1")
os.set_blocking(first[0], False)
def is_first():
    try:
        return bool(os.read(first[0], 1))
    except BlockingIOError:
        return False
def grammar_of(constraint, special, real=guidance.grammar_of):
    if constraint.pattern == "always" or constraint.pattern == "once" and is_first():
        os.kill(os.getpid(), signal.SIGKILL)
    return real(constraint, special)
guidance.grammar_of = grammar_of
sys.exit(trial.main())
"""


def test_an_exception_that_nobody_foresaw_is_no_refusal(monkeypatch):
    trials = Trials(constrained.TOKENS.tokens, constrained.TOKENS.special, 1)
    command = sys.executable, "-P", "-c", BROKEN
    monkeypatch.setattr("tokenpod.engine.constraints.trials._COMMAND", command)
    with pytest.raises(Fault, match="ZeroDivisionError"):
        trials.try_first(Regex("bad"), 60)
    assert trials.try_first(Regex("a"), 60)


def test_its_processes_end_with_the_first_and_others_take_their_place():
    trials = Trials(constrained.TOKENS.tokens, constrained.TOKENS.special, 1)
    assert trials.try_first(Regex("a"), 60)
    first = trials.start().process
    workers = [pid for lane in children_of(first.pid) for pid in (lane, *children_of(lane))]
    assert len(workers) == 3  # one of the first's own, the other lane and its worker
    first.kill()
    while any(alive(pid) for pid in workers):
        time.sleep(0.01)
    assert trials.try_first(Regex("b"), 60)


def test_a_worker_that_the_kernel_kills_is_no_constraints_fault(monkeypatch):
    trials = Trials(constrained.TOKENS.tokens, constrained.TOKENS.special, 1)
    command = sys.executable, "-P", "-c", KILLED
    monkeypatch.setattr("tokenpod.engine.constraints.trials._COMMAND", command)
    assert trials.try_first(Regex("once"), 60)
    with pytest.raises(Lost):
        trials.try_first(Regex("always"), 60)
    assert trials.try_first(Regex("a"), 60)
    monkeypatch.setattr("tokenpod.engine.constraints.trials._COMMAND", (sys.executable, "-c", ""))
    trials._end(trials.start())
    with pytest.raises(Lost):
        trials.try_first(Regex("a"), 60)


def test_who_finds_late_that_lanes_are_gone_does_not_end_their_successors():
    trials = Trials(constrained.TOKENS.tokens, constrained.TOKENS.special, 1)
    old = trials.start()
    old.process.kill()
    assert trials.try_first(Regex("b"), 60)
    new = trials.start()
    # Another thread had waited for one of the old lanes, and finds now that it is gone.
    trials._end(old)
    assert trials.start() is new
    assert new.process.poll() is None
    assert trials.try_first(Regex("b"), 60)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_trial_has_prepared_is_compiled_alike(trials):
    library = Guidance(constrained.TOKENS.tokens, constrained.TOKENS.special)
    for constraint in (Regex("[ab]{3}"), Choice(("a", "b")), Tagged((), triggers=("<",))):
        prepared = trials.try_first(constraint, 60)
        assert prepared == library.prepare(constraint)[0]


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable schema: minimum"),
        (schema({"$ref": "#"}), "no text conforms to it"),
        (Grammar('start: "a"\n  nothing'), "line 2, column 10: "),
    ],
)
def test_problems_are_told_in_terms_of_what_was_sent(trials, constraint, problem):
    with pytest.raises(Refused) as refused:
        trials.try_first(constraint, 60)
    assert str(refused.value).startswith(problem)


def test_the_librarys_own_settings_are_not_told():
    library = Guidance(constrained.TOKENS.tokens, constrained.TOKENS.special)
    with pytest.raises(Refused, match=r"^its expressions have too many states$"):
        library.prepare(Regex("x*" * 1500))


@pytest.mark.parametrize(
    "pattern", ["(a{1000}){1000}", "(a|a)*b", "(a+)+", "x*" * 500, ".*a.{60}b", "(.*a.{20}){5}"]
)
def test_patterns_that_explode_elsewhere_are_served_or_end_at_a_limit(trials, pattern):
    prepared, chance = trials.try_first(Regex(pattern), 60), random.Random(1)
    library = Guidance(constrained.TOKENS.tokens, constrained.TOKENS.special)
    matcher = library.compile(Regex(pattern), prepared)
    words, text = np.zeros(-(-constrained.VOCABULARY // 32), np.int32), b""
    try:
        for _ in range(30):
            if matcher.fill(words) and not words.any():
                break
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            token = chance.choice(allowed.tolist())
            matcher.take(token)
            text += constrained.TOKENS.tokens[token]
    except LimitReached:
        assert "." in pattern
    assert text


def test_others_go_on_beside_constraints_that_never_compile():
    model = demo_model()
    asked = [ask(1, ENDLESS, new=4), ask(2, DEEP[0], new=4)]
    asked += [ask(i, Regex("[ab]{12}"), new=20, **RANDOM) for i in (3, 4)]
    limits = ConstraintLimits(workers=1, compile_seconds=0.6)
    client = serve(model, Client(asked), limits=limits, trials=True)
    assert client.finishes == dict.fromkeys((3, 4), FinishCode.EOS)
    assert "takes more than 0.6 s" in client.failures[1]
    # On a busy machine even its end takes longer.
    assert re.search(r"nested too deeply|takes more than 0.6 s", client.failures[2])
