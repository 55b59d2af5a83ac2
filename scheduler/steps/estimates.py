"""A lower bound of the time that a prompt takes, from the fastest recent steps.

Requests are dropped by it, so it must never be too high. It uses the fastest recent steps, takes a
larger step to last at least as long as a smaller one did, counts the prompt's own steps alone (not
the queue before it, whose sequences may end early), and halves the sum. Sizes of steps that have
not been measured often enough count as 0.
"""

from __future__ import annotations

#: Steps of one size that are watched before they count, and after which the oldest are forgotten.
_ENOUGH = 16
_WINDOW = 64


class _Fastest:
    """The least of the last 64 to 128 values."""

    __slots__ = ("_before", "_count", "_now")

    def __init__(self) -> None:
        self._before: int | None = None
        self._now = 0
        self._count = 0

    def add(self, value: int) -> None:
        self._now = min(self._now, value) if self._count else value
        self._count += 1
        if self._count == _WINDOW:
            self._before, self._count = self._now, 0

    @property
    def value(self) -> int:
        """0 while too few are known."""
        if self._before is None:
            return self._now if self._count >= _ENOUGH else 0
        return min(self._before, self._now) if self._count else self._before


class Pace:
    """Times of steps that held prompt tokens.

    Args:
        prefill_tokens: prompt tokens that one step takes.
    """

    def __init__(self, prefill_tokens: int) -> None:
        self._prefill_tokens = prefill_tokens
        #: Steps of 2**k to 2**(k + 1) - 1 prompt tokens at k.
        self._sizes = [_Fastest() for _ in range(prefill_tokens.bit_length())]

    def note(self, prompt_tokens: int, took: int) -> None:
        """A step with so many prompt tokens (0: it does not count) took `took` nanoseconds."""
        if prompt_tokens:
            size = min(prompt_tokens.bit_length(), len(self._sizes)) - 1
            self._sizes[size].add(took)

    def least(self, prompt_tokens: int) -> int:
        """Nanoseconds that a prompt's computation surely takes; 0 if nothing is known."""
        steps, rest = divmod(prompt_tokens, self._prefill_tokens)
        return (steps * self._step(self._prefill_tokens) + self._step(rest)) // 2

    def _step(self, prompt_tokens: int) -> int:
        """A step of this size: no faster than the fastest of any smaller one."""
        count = len(self._sizes)
        if prompt_tokens < self._prefill_tokens:
            # Those whose largest step is not larger than this one.
            count = (prompt_tokens + 1).bit_length() - 1
        return max((fastest.value for fastest in self._sizes[:count]), default=0)
