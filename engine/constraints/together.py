"""Reads a token of many texts at once, and makes their masks by one call of the library.

The library needs 10 us for most masks, as much as a few lines of Python. So what is done to each
mask here, is done to all of them by few calls. Threads of ours would ask for the interpreter's lock
several times a mask, while the step loop plans under it: with 64 texts of 128,000 words on a GPU a
third of the masks were late so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tokenpod.engine.constraints.library import Advanced, Library, Words
from tokenpod.engine.constraints.text import MOST_AHEAD, ConstrainedText, Ends


def read_together(
    library: Library, texts: Sequence[tuple[ConstrainedText, int]], threads: int
) -> list[ConstrainedText]:
    """Read a token of each text, and make the next mask and those behind it that are forced.

    Args:
        library: that of their matchers, each of which it takes into `advance`.
        texts: with what each reads. No other thread works at them.
        threads: for the library.

    Returns those whose masks may have taken long.
    """
    suspects = []
    for ahead in range(MOST_AHEAD + 1):
        made = library.advance([(text.matcher, token) for text, token in texts], threads)
        suspects += [texts[at][0] for at in made.suspects]
        for at in made.over:
            texts[at][0].end()
        over = frozenset(made.over)
        left = [at for at in range(len(texts)) if at not in over]
        _narrow(made, [(at, texts[at][0]) for at in left])
        allowed = _allowed(made.words)
        forced = []
        for at in left:
            text = texts[at][0]
            few, whole = allowed.get(at, 2), bool(made.ends[at])
            mask = text.add(made.words[at], few, whole=whole, may_force=ahead < MOST_AHEAD)
            if mask.forced >= 0:
                forced.append((text, mask.forced))
        if not forced:
            break
        texts = forced
    return suspects


def _narrow(made: Advanced, texts: Sequence[tuple[int, ConstrainedText]]) -> None:
    """Narrow masks to what requests say of tokens: those of these texts, by their number."""
    same: dict[Ends, tuple[list[int], list[bool]]] = defaultdict(lambda: ([], []))
    for at, text in texts:
        rows, late_enough = same[text.ends]
        rows.append(at)
        late_enough.append(text.went_on())
    for ends, (some, enough) in same.items():
        which = np.array(some)
        ends.put(made.words, which, made.ends[which] & np.array(enough))
    for at, text in texts:
        if text.allowed is not None:
            made.words[at] &= text.allowed


def _allowed(words: Words) -> dict[int, int]:
    """How many tokens masks [n, words] allow, of those that may allow none or a single one."""
    either = np.bitwise_or.reduce(words, axis=1).view(np.uint32)
    few = np.flatnonzero(np.bitwise_count(either) <= 1).tolist()
    return {at: int(np.bitwise_count(words[at].view(np.uint32)).sum()) for at in few}
