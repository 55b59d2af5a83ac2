"""How long a step takes on a machine: a linear model, fitted to measured steps.

    t = fixed + rows * r + context * c + prompt_tokens * p + pairs * a

`rows` decode a token each and read `context` tokens of keys and values together; `prompt_tokens`
are computed, whose attention has `pairs` of a token and one that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step holds."""

    rows: int = 0
    context: int = 0
    prompt_tokens: int = 0
    pairs: int = 0

    @classmethod
    def of_prompt(cls, tokens: int, start: int = 0) -> StepSize:
        """A piece of a prompt by itself, behind `start` tokens."""
        return cls(prompt_tokens=tokens, pairs=tokens * start + tokens * (tokens + 1) // 2)

    @classmethod
    def of_rows(cls, rows: int, context: int) -> StepSize:
        """So many rows that decode, each behind `context` tokens."""
        return cls(rows=rows, context=rows * context)


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """Seconds by what a step holds: the coefficients of the model above."""

    fixed: float
    row: float
    context: float
    prompt_token: float
    pair: float

    def nanoseconds(self, size: StepSize) -> int:
        """Of one step."""
        return round(1e9 * (self._still(size) + self.context * size.context))

    def run(self, size: StepSize, steps: int) -> Ints:
        """[steps] nanoseconds of steps that begin like this one, and in which every row grows."""
        context = size.context + size.rows * np.arange(steps)
        # As `nanoseconds` has it to the last bit: jumps must change nothing.
        seconds = self._still(size) + self.context * context
        times: Ints = np.rint(1e9 * seconds).astype(np.int64)
        return times

    def _still(self, size: StepSize) -> float:
        """What does not change while rows grow."""
        return (
            self.fixed
            + self.row * size.rows
            + self.prompt_token * size.prompt_tokens
            + self.pair * size.pairs
        )


def fitted(measured: list[tuple[StepSize, float]]) -> MachineTimes:
    """The model with the least squares of relative errors, and no coefficient below 0.

    Args:
        measured: steps and their seconds.
    """
    rows = [(1, s.rows, s.context, s.prompt_tokens, s.pairs) for s, _ in measured]
    seconds = np.array([each for _, each in measured])
    weighed = np.array(rows, np.float64) / seconds[:, None]
    scale = weighed.max(axis=0)
    weighed /= np.where(scale > 0, scale, 1)
    used = scale > 0
    found = np.zeros(5)
    # A coefficient below 0 leaves the model, the least one first.
    while True:
        found[:] = 0
        found[used] = np.linalg.lstsq(weighed[:, used], np.ones(len(seconds)), rcond=None)[0]
        if found.min() >= 0:
            break
        used[found.argmin()] = False
    return MachineTimes(*(found / np.where(scale > 0, scale, 1)).tolist())
