"""The arithmetic of exact admission: an admitted request never runs out of memory.

The argument (after LightLLM's Efficient Router). Sequences that decode advance in lockstep: every
step runs all of them. So the future is known except for early ends, which only help. A sequence
that has h tokens with l to come has h + min(t, l) after t steps and nothing after l. The sum over
all sequences has its maxima where one ends, so it is enough to look there.

A sequence whose prompt is still being computed starts to grow up to `delay` steps later. Prompts
are computed in order, at least so many tokens of them in every step, so the delay is bounded.
Whatever it turns out to be, the sequence has at most h + min(t, l) tokens at step t and has ended
after delay + l. That envelope is what is summed. A preempted sequence is one whose prompt is longer
by its outputs. A router's sequence grows when the router says and may stay for ever: all of its
bound counts, at all times (`FOREVER`).

Slots shared through the tree count once, for the sequence that locks them longest. What no sequence
locks can be evicted and does not count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Later than every other end.
FOREVER = 1 << 40

Ints = npt.NDArray[np.int64]


def peak_tokens(held: npt.ArrayLike, left: npt.ArrayLike, end: npt.ArrayLike) -> int:
    """The most tokens that these sequences will ever have at once, in O(n log n).

    Args:
        held: [n] tokens that each has now, or needs before it can grow. An entry below 0 takes back
            part of another, until its own end.
        left: [n] tokens that each can still grow by, one per step.
        end: [n] steps until it has ended for sure, at least `left`; or FOREVER.
    """
    h, rest, ends = (np.asarray(column, np.int64) for column in (held, left, end))
    if not len(h):
        return 0
    if ends.min() >= FOREVER:
        return int((h + rest).sum())
    order = ends.argsort()
    moments, firsts = np.unique(ends[order], return_index=True)
    # At moment t: the sum of h + min(rest, t) over those that end at t or later. Those with more
    # than t to come end later, so what min cuts off is summed over all with rest > t.
    whole = _suffix_sums((h + rest)[order])[firsts]
    growing = np.sort(rest)
    at = growing.searchsorted(moments)
    cut = _suffix_sums(growing)[at] - moments * (len(growing) - at)
    return int((whole - cut).max())


def _suffix_sums(values: Ints) -> Ints:
    """[n + 1] the sum of the values from each index on."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values[::-1], out=sums[-2::-1])
    return sums
