"""In which order requests of one priority are served: the numbers by which the queue sorts them."""

from __future__ import annotations

from typing import Protocol

#: Of `Shortest`: a prompt lets pass so many times its own tokens, but no more than so many steps'.
_PATIENCE, _STEPS = 256, 64


class Order(Protocol):
    """Gives each request its number; the least is served first, and none has another's."""

    def number(self, tokens: int) -> int:
        """Of the request that has just come, of whose prompt so many tokens must be computed."""


class Arrival:
    """First come, first served."""

    def __init__(self) -> None:
        self._came = 0

    def number(self, tokens: int) -> int:
        """How many had come."""
        del tokens
        self._came += 1
        return self._came


class Shortest:
    """Short prompts first, with a bound on what passes a longer one.

    A request's number is the prompt tokens that came before it, and `_PATIENCE` times its own. So
    those that come later and are served earlier have fewer tokens together than it lets pass: in a
    burst short prompts don't wait for long ones, and no prompt waits for ever.

    Args:
        prefill_tokens: prompt tokens that one step takes.
    """

    def __init__(self, prefill_tokens: int) -> None:
        self._most = _STEPS * prefill_tokens
        self._came = self._tokens = 0

    def number(self, tokens: int) -> int:
        """By tokens; among equals by arrival."""
        passed_by = self._tokens + min(_PATIENCE * tokens, self._most)
        self._tokens += tokens
        self._came += 1
        return (passed_by << 64) + self._came
