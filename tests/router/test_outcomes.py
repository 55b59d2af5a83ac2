"""What a story's report takes for a fault, and what the story itself explains."""

from __future__ import annotations

from typing import Any

import pytest

from router.outcomes import Ending, Event, Outcome, Report, ended_alone
from router.records import FinishReason
from router.streams import Prompt, Result, Token

PLAIN = Prompt(text="x", input_length=1, max_new_tokens=3)
ODD = Prompt(text="x", input_length=1, max_new_tokens=3, grammar="a+(?=b)")


def fault(ending: Ending, *befell: Event, prompt: Prompt = PLAIN, **found: Any) -> str | None:
    outcome = Outcome(prompt=prompt, ending=ending, befell=frozenset(befell), **found)
    return outcome.fault("abc")


def test_a_text_must_be_that_of_the_request_alone() -> None:
    assert fault(Ending.FINISHED, text="abc") is None
    assert "with 'abd'; alone it has 'abc'" in str(fault(Ending.FINISHED, text="abd"))
    assert Outcome(prompt=PLAIN, ending=Ending.FINISHED, text="abd").fault(None) is None


@pytest.mark.parametrize("ending", [Ending.HUNG_UP, Ending.REFUSED])
def test_what_clients_and_routers_decide_is_no_fault(ending: Ending) -> None:
    assert fault(ending) is None


@pytest.mark.parametrize(
    ("befell", "tokens", "allowed"),
    [
        ((), 0, False),
        ((Event.RESTART,), 2, True),
        ((Event.KILL,), 2, True),
        ((Event.DRAIN,), 0, True),
        ((Event.DRAIN,), 1, False),
    ],
)
def test_a_request_fails_with_its_router_or_pod_or_waiting_in_a_drain(
    befell: tuple[Event, ...], tokens: int, allowed: bool
) -> None:
    assert (fault(Ending.FAILED, *befell, tokens=tokens) is None) is allowed


@pytest.mark.parametrize(
    ("befell", "allowed"),
    [((), False), ((Event.RESTART,), False), ((Event.DRAIN,), False), ((Event.KILL,), True)],
)
def test_only_a_kill_loses_requests(befell: tuple[Event, ...], allowed: bool) -> None:
    assert (fault(Ending.LOST, *befell) is None) is allowed


def test_only_what_can_not_be_served_ends_alone_and_it_does() -> None:
    assert fault(Ending.ENDED_ALONE, prompt=ODD) is None
    assert "nothing special" in str(fault(Ending.ENDED_ALONE))
    assert "can not be served" in str(fault(Ending.FINISHED, prompt=ODD, text="abc"))


@pytest.mark.parametrize(
    ("changed", "alone"),
    [
        ({}, True),
        ({"logprob": -0.5}, False),
        ({"is_special": False}, False),
        ({"text": "x"}, False),
        ({"generated_tokens": 2}, False),
        ({"reason": FinishReason.LENGTH}, False),
    ],
)
def test_ending_alone_has_one_form(changed: dict[str, Any], alone: bool) -> None:
    form = {"text": "", "logprob": 0.0, "is_special": True, "generated_tokens": 1}
    form |= {"reason": FinishReason.EOS_TOKEN} | changed
    token = Token(2, form["text"], form["logprob"], form["is_special"], None)
    result = Result((token,), None, "", form["generated_tokens"], form["reason"], None)
    assert ended_alone(result) is alone


def test_a_report_names_panics_first_and_counts_endings() -> None:
    report = Report(7, panics=["FilterBatch failed"], complaints=["2 blocks are missing"])
    report.outcomes += [Outcome(prompt=PLAIN, ending=Ending.LOST, error="no batch")] * 2
    assert report.faults(lambda _: None) == [
        "the router died: FilterBatch failed",
        "2 blocks are missing",
        "'x' (0 tokens read) LOST: no batch",
        "'x' (0 tokens read) LOST: no batch",
    ]
    assert str(report) == "story 7: 2 LOST; 1 panics"
