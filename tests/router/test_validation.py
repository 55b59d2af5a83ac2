"""What the router refuses, and what it makes of the rest."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from router.driving import SETTINGS, prompt, tokenize
from router.queue import Entry
from router.records import GrammarType, Sampling
from router.startup import Limits, RouterSettings
from router.streams import Prompt, Stream
from router.validation import Validation, ValidationError

LIMITS = Limits(max_input_tokens=40, max_total_tokens=80, max_batch_total_tokens=1000)


def entry(asked: Prompt, settings: RouterSettings = SETTINGS, **wanted: Any) -> Entry:
    return Validation(settings, LIMITS, random.Random(0), **wanted).entry(asked, Stream())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (prompt(1, "x" * 40), "41 tokens; the limit is 40"),
        (prompt(75), "over max_total_tokens, 80"),
        (prompt(0), "max_new_tokens is 0"),
        (prompt(1, ""), "inputs is empty"),
        (prompt(1, truncate=0), "truncate is 0; it must be 1 to 40"),
        (prompt(1, truncate=41), "truncate is 41; it must be 1 to 40"),
        (prompt(1, stop_sequences=("a",) * 5), "stop has 5 sequences; the limit is 4"),
        (prompt(1, top_n_tokens=6), "top_n_tokens is 6; the limit is 5"),
    ],
)
def test_prompts_over_the_limits_are_refused(asked: Prompt, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        entry(asked)


def test_a_truncated_prompt_counts_what_is_left() -> None:
    made = entry(prompt(1, "x" * 99, truncate=5))
    assert (made.input_length, made.truncate) == (5, 5)


def test_without_truncate_the_shard_is_told_the_limit() -> None:
    assert entry(prompt(1)).truncate == 40


def test_a_tokenizer_counts_for_itself() -> None:
    made = entry(replace(prompt(1), input_length=3), tokenizer=tokenize)
    assert made.input_length == 6
    assert list(made.prompt.ids) == tokenize("hello")


def test_one_turn_brings_at_most_the_generation_length() -> None:
    made = entry(prompt(60), replace(SETTINGS, generation_length=50))
    assert (made.max_new_tokens, made.wanted_tokens) == (50, 60)


def test_a_missing_seed_is_drawn_and_a_given_one_kept() -> None:
    assert entry(prompt(1)).prompt.sampling.seed != 0
    assert entry(prompt(1, sampling=Sampling(seed=7))).prompt.sampling.seed == 7


@pytest.mark.parametrize(("name", "adapter"), [("tgi", None), ("gpt-4", "gpt-4"), ("", "")])
def test_every_model_but_its_own_is_an_adapter(name: str, adapter: str | None) -> None:
    assert prompt(1, model=name).adapter_id == adapter


def test_a_grammar_reaches_the_shard_as_a_regular_expression() -> None:
    chooser = entry(prompt(1, grammar="[a-z]+")).prompt.chooser
    assert (chooser.grammar, chooser.grammar_type) == ("[a-z]+", GrammarType.REGEX)
    assert entry(prompt(1)).prompt.chooser.grammar_type is GrammarType.NONE


def test_grammars_can_be_refused() -> None:
    with pytest.raises(ValidationError, match="grammar is not supported"):
        entry(prompt(1, grammar="[a-z]+"), replace(SETTINGS, disable_grammar_support=True))
