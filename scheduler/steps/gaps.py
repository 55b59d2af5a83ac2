"""How many prompt tokens a step may hold, so that running streams don't wait too long for it.

settled steps --their sizes and times--> the model of steps' times --> tokens within the bound
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import chain, repeat
from math import sqrt

from tokenpod.scheduler.steps.machine_times import MachineTimes, StepSize, fitted

#: Steps that the model is fitted to, of each size: of 2**k to 2**(k + 1) - 1 prompt tokens.
_KEPT = 16
#: The model is fitted again after so many of them; before the first time nothing is known.
_REFITTED = 4
#: Times the prompt tokens of the largest step so far a step may have.
_GROWTH = 2
#: What follows the prompts that are known: prompts of this length.
_OTHERS = 512
#: What prompts may add to a step that takes longer than it may without: else they would hardly go
#: on, and gaps would be no shorter to speak of.
_MORE = 0.5
#: A step counts as no longer than so many times what the model says, once that is fitted to as many
#: steps as these, or to those that were timed before: it may have been held up.
_OUTLIER, _ENOUGH = 2.0, 24
#: Of so many of the last steps beside streams, all but so many are to keep the bound: what these
#: took beyond what the model says of them is taken off it.
_WATCHED, _LATE = 12, 1


class GapBound:
    """Bounds the time of steps that streams wait for, by their prompt tokens.

    Args:
        most: nanoseconds that such a step may take; half as long again as one without prompts, if
            that is more.
        least_tokens: prompt tokens that it may have however long it takes.
        most_tokens: of any step.
        measured: steps that were timed before, and their seconds. Without these the first steps,
            which may be slow for reasons of their own, are all that is known for a while.
    """

    def __init__(
        self,
        most: int,
        least_tokens: int,
        most_tokens: int,
        measured: Iterable[tuple[StepSize, float]] = (),
    ) -> None:
        self._most = most / 1e9
        self._least_tokens, self._most_tokens = least_tokens, most_tokens
        self._seen: defaultdict[int, deque[tuple[StepSize, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )
        self._times: MachineTimes | None = None
        #: Steps that it was fitted to, and those that have settled since then.
        self._fitted_to = self._new = 0
        #: Prompt tokens of the largest step so far.
        self._largest = 0
        for size, seconds in measured:
            self._add(size, seconds)
        #: The last steps beside streams, and their nanoseconds.
        self._last: deque[tuple[StepSize, int]] = deque(maxlen=_WATCHED)
        #: Steps that the model must have been fitted to before it says what is out of the ordinary.
        self._enough = self._new or _ENOUGH

    def note(self, size: StepSize, took: int) -> None:
        """A step with prompts has settled; it took so many nanoseconds, more than 0."""
        if self._times is not None and self._fitted_to >= self._enough:
            took = min(took, int(_OUTLIER * self._times.nanoseconds(size)) or took)
        self._add(size, took / 1e9)
        if size.rows:
            self._last.append((size, took))

    def _add(self, size: StepSize, seconds: float) -> None:
        self._largest = max(self._largest, size.prompt_tokens)
        self._seen[size.prompt_tokens.bit_length()].append((size, seconds))
        self._new += 1

    def prompt_tokens(self, rows: int, context: int, prompts: Iterable[tuple[int, int]]) -> int:
        """How many prompt tokens a step may have beside rows that decode.

        Args:
            rows: that decode.
            context: tokens that they read together.
            prompts: of each that comes next, the tokens that are computed and those that are not.
        """
        if self._new >= _REFITTED:
            steps = [*chain(*self._seen.values())]
            self._times, self._fitted_to, self._new = fitted(steps), len(steps), 0
        times = self._times
        if times is None:
            return self._least_tokens
        left = self._left(times, times.nanoseconds(StepSize(rows, context)) / 1e9)
        tokens = 0
        for start, n in chain(prompts, repeat((0, _OTHERS))):
            if tokens >= self._most_tokens:
                break
            each = times.prompt_token + times.pair * (start + 0.5)
            took = each * n + times.pair * n * n / 2
            if took > left:
                # The larger the piece, the more pairs each of its tokens makes.
                tokens += int(2 * left / (each + sqrt(each * each + 2 * times.pair * left)))
                break
            left -= took
            tokens += n
        # What is far from all that was seen is not known.
        most = min(_GROWTH * self._largest, self._most_tokens)
        return max(min(tokens, most), self._least_tokens)

    def beside(self, rows: int, context: int) -> int:
        """Nanoseconds that other work may take between a step of such rows and the next.

        No more than the step: on a GPU the host queues it while the step is computed.
        """
        times = self._times
        if not rows:
            return int(self._most * 1e9)
        if times is None:
            return 0
        step = times.nanoseconds(StepSize(rows, context))
        return min(int(1e9 * self._left(times, step / 1e9)), step)

    def _left(self, times: MachineTimes, without: float) -> float:
        """Seconds that a step may take beyond those that it takes without prompts."""
        return max(self._most / self._margin(times) - without, _MORE * without)

    def _margin(self, times: MachineTimes) -> float:
        """What the model's times are multiplied by: it knows lines, and machines have knees."""
        if len(self._last) <= _LATE:
            return 1.0
        ratios = sorted(took / max(times.nanoseconds(size), 1) for size, took in self._last)
        return max(ratios[-1 - _LATE], 1.0)
