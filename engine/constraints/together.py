"""Reads a token of many texts at once, and makes their masks by one call of the library.

The library needs 10 us for most masks, and spreads them over threads of its own. Threads of ours
would ask for the interpreter's lock several times a mask, while the step loop plans under it: with
64 texts of 128,000 words on a GPU a third of the masks were late so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenpod.engine.constraints.library import Library
from tokenpod.engine.constraints.text import MOST_AHEAD, ConstrainedText


def read_together(
    library: Library, texts: Sequence[tuple[ConstrainedText, int]], threads: int
) -> None:
    """Read a token of each text, and make the next mask and those behind it that are forced.

    Args:
        library: that of their matchers, each of which it takes into `advance`.
        texts: with what each reads. No other thread works at them.
        threads: for the library.
    """
    for ahead in range(MOST_AHEAD + 1):
        words, ends = library.advance([(text.matcher, token) for text, token in texts], threads)
        for (text, _), row, whole in zip(texts, words, ends, strict=True):
            if whole is not None:
                text.narrow_behind(row, whole=whole)
        # At once: each call on a long row lets go of the interpreter's lock, and must wait for it.
        allowed = np.bitwise_count(words.view(np.uint32)).sum(axis=1).tolist()
        forced = []
        for (text, _), row, whole, count in zip(texts, words, ends, allowed, strict=True):
            if whole is None:
                text.end()
                continue
            mask = text.add(row, count, whole=whole, may_force=ahead < MOST_AHEAD)
            if mask.forced >= 0:
                forced.append((text, mask.forced))
        if not forced:
            return
        texts = forced
