"""What is asked: prompts and output lengths, each a function of (seed, level, request number)."""

from __future__ import annotations

import json

import msgspec
import numpy as np

from tokenpod.cli.bench.lengths import Lengths

#: Which stream of random numbers: none of them may repeat another.
_REQUEST, _PREFIX, _ARRIVALS = range(3)


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    """Lengths from distributions, independent of each other."""

    prompt: Lengths
    output: Lengths


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """Pairs of prompt and output tokens, in order, from the start again after the last."""

    pairs: list[tuple[int, int]]
    at: list[float] = []


class TokenPrompts(msgspec.Struct, frozen=True, tag="tokens"):
    """Prompts of random token ids.

    Args:
        lengths: tokens of each prompt, without its prefix, and of each output.
        low, high: ids are drawn from [low, high).
        prefix_tokens: tokens before each prompt that all requests of a group share.
        prefix_groups: how many groups; each request is of one, at random.
    """

    lengths: Drawn | Listed
    low: int
    high: int
    prefix_tokens: int = 0
    prefix_groups: int = 1


class Text(msgspec.Struct, frozen=True):
    """A prompt from a file: a text, or the messages of a chat as (role, content)."""

    text: str = ""
    messages: list[tuple[str, str]] = []
    max_new_tokens: int | None = None


class TextPrompts(msgspec.Struct, frozen=True, tag="texts"):
    """Prompts from a file, in order, from the start again after the last."""

    texts: list[Text]
    output: Lengths


Prompts = TokenPrompts | TextPrompts


class Ask(msgspec.Struct, frozen=True):
    """One request: its number in its level, its prompt, and how many tokens it asks for."""

    index: int
    prompt: list[int] | Text
    max_new_tokens: int


def ask(prompts: Prompts, seed: int, level: int, index: int) -> Ask:
    """Request `index` of a level. Two levels share no prompt and no prefix."""
    random = np.random.default_rng([seed, level, _REQUEST, index])
    if isinstance(prompts, TextPrompts):
        text = prompts.texts[index % len(prompts.texts)]
        return Ask(index, text, text.max_new_tokens or prompts.output.draw(random))
    if isinstance(prompts.lengths, Listed):
        length, output = prompts.lengths.pairs[index % len(prompts.lengths.pairs)]
    else:
        length = prompts.lengths.prompt.draw(random)
        output = prompts.lengths.output.draw(random)
    prefix: list[int] = []
    if prompts.prefix_tokens:
        group = int(random.integers(0, prompts.prefix_groups))
        of_group = np.random.default_rng([seed, level, _PREFIX, group])
        prefix = _ids(prompts, of_group, prompts.prefix_tokens)
    return Ask(index, prefix + _ids(prompts, random, length), output)


def arrivals_random(seed: int, level: int) -> np.random.Generator:
    """Where the arrival times of a level are drawn from."""
    return np.random.default_rng([seed, level, _ARRIVALS])


def _ids(prompts: TokenPrompts, random: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = random.integers(prompts.low, prompts.high, count).tolist()
    return ids


class PromptFileError(ValueError):
    """A file of prompts that is not what it should be; the text names the line."""


def read_texts(content: str, *, json_lines: bool) -> list[Text]:
    """The prompts of a file: a line each, or a JSON object a line.

    An object has a `prompt`, or `messages` with `role` and `content` each, and may have
    `max_new_tokens`. Empty lines are skipped. Raises PromptFileError.
    """
    lines = [(n, line) for n, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines:
        raise PromptFileError("has no prompts")
    return [_text(n, line) if json_lines else Text(line) for n, line in lines]


def _text(number: int, line: str) -> Text:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptFileError(f"line {number} is not JSON: {error}") from error
    row = row if isinstance(row, dict) else {}
    tokens = row.get("max_new_tokens")
    if tokens is not None and not (type(tokens) is int and tokens > 0):
        raise PromptFileError(f"line {number}: max_new_tokens is {tokens!r}: must be at least 1")
    if isinstance(row.get("prompt"), str):
        return Text(row["prompt"], max_new_tokens=tokens)
    try:
        messages = [(str(m["role"]), str(m["content"])) for m in row["messages"]]
    except (KeyError, TypeError):
        messages = []
    if not messages:
        raise PromptFileError(f"line {number} has neither a prompt nor messages")
    return Text(messages=messages, max_new_tokens=tokens)
