"""May this request join? The promise: once in, it never runs out of memory.

The argument (after LightLLM's Efficient Router). Sequences that decode advance in lockstep: every
step runs all of them. So the future is known but for early ends, which only help. A sequence that
holds h tokens with l to come holds h + min(t, l) after t steps and nothing after l. The sum over
all sequences has its maxima where one ends, so it is enough to look there:

    peak = max over k of (sum of held over the k + 1 that last longest, each grown by left_k)

A sequence whose prompt is still being computed starts to grow up to `delay` steps later. Prompts
are computed in order and get a guaranteed share of every step, so the delay is bounded; whatever it
turns out to be, the sequence holds at most h + min(t, l) at step t and is gone after delay + l.
That envelope is what is summed. A sequence that a router holds grows when the router says and may
stay for ever: all of its bound counts, at all times (`FOREVER`).

Slots shared through the tree count once, for the sequence that locks them longest. What nobody
locks can be evicted and does not count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: A delay that no end comes after.
FOREVER = 1 << 40

Ints = npt.NDArray[np.int64]


def peak_tokens(held: npt.ArrayLike, left: npt.ArrayLike, delay: npt.ArrayLike = 0) -> int:
    """The most tokens that these sequences will ever hold at once.

    Args:
        held: [n] tokens each holds now, or needs before it can grow.
        left: [n] tokens each can still grow by, one a step.
        delay: [n] or scalar: steps until its growth has surely begun. FOREVER: it never leaves, and
            its growth counts from the start.
    """
    h, rest = np.asarray(held, np.int64), np.asarray(left, np.int64)
    if not len(h):
        return 0
    wait = np.broadcast_to(np.asarray(delay, np.int64), h.shape)
    stays = wait >= FOREVER
    frozen = int((h + rest)[stays].sum())
    h, rest, ends = h[~stays], rest[~stays], (wait + rest)[~stays]
    if not len(h):
        return frozen
    moments = np.unique(ends)[:, None]
    holding = np.where(ends >= moments, h + np.minimum(rest, moments), 0)
    return frozen + int(holding.sum(axis=1).max())
