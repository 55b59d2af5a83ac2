"""How long steps take, by their tokens: from recent ones, forgotten when they are old."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Sizes with times of their own, rising; a larger step counts as the last.
_RANGES = (range(1, 9), range(10, 17, 2), range(20, 33, 4), range(40, 65, 8), range(80, 129, 16))
_SIZES = np.concatenate([*_RANGES, range(160, 257, 32), (320, 384)])
#: What one more step of a size changes its time by, and by how much it may be out of the ordinary.
_SMOOTHING = 1 / 8
_OUTLIER = 2.0
#: Of the first steps of a size the shortest counts: one that was held up must not count for long.
_FIRST = 4
#: A size that has not been seen for so many steps is unknown again: contexts have grown since. One
#: that was seen once is so after fewer, twice as many for each time more: it may have been held up.
_MEMORY = 512
_SHORT_MEMORY = 64


class StepTimes:
    """Usual times of steps, in nanoseconds."""

    def __init__(self) -> None:
        self._times = np.zeros(len(_SIZES))
        #: The step from which on a size is unknown, and how often it was seen.
        self._until = np.zeros(len(_SIZES), np.int64)
        self._counts = np.zeros(len(_SIZES), np.int64)
        self._steps = 0

    def passed(self) -> None:
        """There was a step, of these or of others: what is known is older by one."""
        self._steps += 1

    def note(self, tokens: int, took: int) -> None:
        """The step that has passed had so many tokens and took `took` nanoseconds."""
        at = min(int(_SIZES.searchsorted(tokens)), len(_SIZES) - 1)
        usual = self._times[at]
        if not self._counts[at] or self._steps >= self._until[at] + _MEMORY:
            self._times[at], self._counts[at] = took, 0
        elif self._counts[at] < _FIRST:
            self._times[at] = min(took, usual)
        else:
            self._times[at] += _SMOOTHING * (min(took, _OUTLIER * usual) - usual)
        memory = _SHORT_MEMORY << min(int(self._counts[at]), _FIRST - 1)
        self._until[at] = self._steps + memory
        self._counts[at] += 1

    def of(self, tokens: float) -> float | None:
        """What a step of so many tokens takes; None: nothing is known of any.

        Between sizes that are known it rises in a line. Up to twice the largest of them it is that
        one's, and grows with the tokens from there: sizes that were never tried are taken to be
        cheap, so that they are tried, but not all at once.
        """
        known = self._known
        if not len(known):
            return None
        far = max(tokens / (2 * _SIZES[known[-1]]), 1.0)
        return float(far * np.interp(tokens, _SIZES[known], self._times[known]))

    def in_line(self, number: float) -> float | None:
        """The same of what grows with a number, from nothing, and does so beyond what is known."""
        known = self._known
        if not len(known):
            return None
        numbers, times = np.append(0, _SIZES[known]), np.append(0.0, self._times[known])
        beyond = max(number - numbers[-1], 0) / (numbers[-1] - numbers[-2])
        more = max(times[-1] - times[-2], 0.0) * beyond
        return float(np.interp(number, numbers, times) + more)

    @property
    def _known(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self._steps < self._until)


class Costs:
    """What steps take, with drafts and without."""

    def __init__(self) -> None:
        #: Nanoseconds between two steps that don't overlap.
        self.gap = 0.0
        #: Steps with drafts that were noted since this was last set to 0.
        self.tries = 0
        self._with, self._without = StepTimes(), StepTimes()
        #: Of a draft model's small steps, by the tokens of one: what so many of them take.
        self._finding: dict[int, StepTimes] = {}

    def note(self, tokens: int, nanoseconds: int, *, drafts: bool, gap: int | None) -> None:
        """A step without prompts has settled.

        Args:
            tokens: of all rows.
            nanoseconds: since it was planned, or the one before it settled, less what finding
                drafts took.
            drafts: whether it had any.
            gap: nanoseconds between the step before and this one; None: they overlapped.
        """
        for times in (self._with, self._without, *self._finding.values()):
            times.passed()
        self.tries += drafts
        (self._with if drafts else self._without).note(tokens, nanoseconds)
        if gap is not None:
            self.gap += (min(gap, 2 * self.gap + 100_000) - self.gap) / 8

    def note_finding(self, width: int, steps: int, nanoseconds: int) -> None:
        """A draft model has taken so long for so many small steps, of so many tokens each."""
        self._finding.setdefault(width, StepTimes()).note(steps, nanoseconds)

    def finding(self, width: float, steps: int) -> float:
        """Nanoseconds of so many; 0: unknown, or there is no draft model.

        Not all of it is in the small steps: the first one waits for the host.
        """
        found = {
            own: took
            for own, times in self._finding.items()
            if (took := times.in_line(steps)) is not None
        }
        if not found:
            return 0.0
        widths = sorted(found)
        return float(np.interp(width, widths, [found[own] for own in widths]))

    def of(self, tokens: float, *, drafts: bool = True) -> float:
        """Nanoseconds of a step; 0: unknown."""
        found = self._with.of(tokens) if drafts else None
        return found or self._without.of(tokens) or 0.0

    def plain(self, rows: int) -> float:
        """Tokens per nanosecond without drafts; 0: unknown."""
        took = self._without.of(rows)
        return rows / took if took else 0.0

    def price(self, rows: int, drafts: float) -> float:
        """What one draft costs, in tokens that rows would make in that time without drafts."""
        took = self._without.of(rows)
        if not took or not drafts:
            return 0.0
        return max(self.of(rows + drafts) - took, 0.0) / drafts * rows / took
