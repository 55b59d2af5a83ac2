"""What requests ask for: prompts of random token ids or from a file, and lengths of outputs."""

from __future__ import annotations

import math

import msgspec
import numpy as np


class Uniform(msgspec.Struct, frozen=True, tag=True):
    """Every length from `low` to `high` tokens, both included, equally often."""

    low: int
    high: int

    def draw(self, random: np.random.Generator) -> int:
        """A length in tokens."""
        return int(random.integers(self.low, self.high + 1))


class LogNormal(msgspec.Struct, frozen=True, tag=True):
    """Many short, few long: the logarithm is normal with deviation `sigma`, cut at 1 and `most`."""

    median: int
    sigma: float
    most: int

    def draw(self, random: np.random.Generator) -> int:
        """A length in tokens."""
        exponent = math.log(self.median) + self.sigma * float(random.normal())
        # Compared as logarithms: a wide sigma overflows `exp`.
        return self.most if exponent >= math.log(self.most) else max(1, round(math.exp(exponent)))


Lengths = Uniform | LogNormal


def parse_lengths(text: str) -> Lengths:
    """`128`, `uniform:16:256` or `lognormal:180:0.9:2048` (median, sigma, longest).

    Raises ValueError that quotes the text and says what is wrong.
    """
    found: Lengths
    try:
        match text.split(":"):
            case ["uniform", low, high]:
                found, rule = Uniform(int(low), int(high)), "needs 1 <= LOW <= HIGH"
                right = 1 <= found.low <= found.high
            case ["lognormal", median, sigma, most]:
                found = LogNormal(int(median), float(sigma), int(most))
                rule = "needs 1 <= MEDIAN <= MAX and SIGMA >= 0"
                right = 1 <= found.median <= found.most and 0 <= found.sigma < math.inf
            case _:
                found, rule = Uniform(int(text), int(text)), "a length is at least 1 token"
                right = found.low >= 1
    except ValueError:
        rule, right = "write N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:MAX", False
    if not right:
        raise ValueError(f"is {text!r}: {rule}")
    return found


class Text(msgspec.Struct, frozen=True):
    """A prompt from a file: a text, or the messages of a chat as (role, content)."""

    text: str = ""
    messages: list[tuple[str, str]] = []
    max_new_tokens: int | None = None


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a run: of random token ids, or from a file. Lists begin again at their end.

    Args:
        input, output: tokens of each prompt without its prefix, and to generate.
        token_range: ids are drawn from [low, high).
        prefix_tokens: tokens before each prompt that all requests of a group have in common.
        prefix_groups: how many groups; each request is of one, at random.
        pairs: prompt and output tokens of each request, in place of `input` and `output`.
        at: when each of `pairs` arrives, in units of 1 / rate; may be empty.
        texts: prompts in place of token ids.
    """

    input: Lengths
    output: Lengths
    token_range: tuple[int, int] = (10, 1000)
    prefix_tokens: int = 0
    prefix_groups: int = 1
    pairs: tuple[tuple[int, int], ...] = ()
    at: tuple[float, ...] = ()
    texts: tuple[Text, ...] = ()
