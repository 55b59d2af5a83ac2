"""Which special tokens a tokenizer puts around a text, and between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

#: Texts that every vocabulary has some token for; the first that the tokenizer can be read by.
_PROBES = (("a", "b"), ("1", "2"), (".", ","))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What stands before, between and behind texts."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    pair_before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    pair_behind: tuple[int, ...] = ()
    #: Of the tokens between two texts, so many belong to the first.
    between_first: int = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialTokens:
        """Those of a tokenizer, found by what it makes of two short texts."""
        backend = tokenizer.backend
        for first, second in _PROBES:
            a, b = (backend.encode(text, add_special_tokens=False).ids for text in (first, second))
            one, two = backend.encode(first), backend.encode(first, second)
            at, there = _find(one.ids, a), _find(two.ids, a)
            then = None if there is None else _find(two.ids, b, there + len(a))
            if at is None or there is None or then is None:
                continue
            end = there + len(a)
            return cls(
                tuple(one.ids[:at]),
                tuple(one.ids[at + len(a) :]),
                tuple(two.ids[:there]),
                tuple(two.ids[end:then]),
                tuple(two.ids[then + len(b) :]),
                sum(kind == 0 for kind in two.type_ids[end:then]),
            )
        return cls()

    @property
    def around_one(self) -> int:
        """Special tokens of a text."""
        return len(self.before) + len(self.behind)

    @property
    def around_two(self) -> int:
        """Special tokens of two."""
        return len(self.pair_before) + len(self.between) + len(self.pair_behind)

    def one(self, ids: Sequence[int]) -> list[int]:
        """A text with its special tokens."""
        return [*self.before, *ids, *self.behind]

    def two(self, first: Sequence[int], second: Sequence[int], offset: int) -> list[int]:
        """Two texts with theirs; `offset` is added to all ids of the second."""
        head = [*self.pair_before, *first, *self.between]
        own = [*second, *self.pair_behind]
        cut = len(self.pair_before) + len(first) + self.between_first
        return [*head[:cut], *(x + offset for x in (*head[cut:], *own))]


def _find(ids: Sequence[int], part: Sequence[int], start: int = 0) -> int | None:
    """Where `part`, which is not empty, begins in `ids`."""
    if not part:
        return None
    for at in range(start, len(ids) - len(part) + 1):
        if list(ids[at : at + len(part)]) == list(part):
            return at
    return None
