"""What a stream has not sent yet, kept small: a reader that stops must not cost what others need.

Tokens are packed, 8 bytes each and as much for each of their top tokens, and cut into pages. A
message carries one page, so that catching up never makes a large one.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenpod.engine.types import Top

#: Bytes from which on a page takes nothing more.
_PAGE_BYTES = 8 * 1024


def _ids() -> array[int]:
    return array("I")


def _floats() -> array[float]:
    return array("f")


@dataclass(slots=True)
class Delta:
    """A run of a sample's output. `token_ids`, `logprobs` and `tops` have one entry a token."""

    _text: bytearray = field(default_factory=bytearray)
    token_ids: array[int] = field(default_factory=_ids)
    logprobs: array[float] = field(default_factory=_floats)
    #: All top tokens, one token's after the other's, and how many each token has.
    _top_ids: array[int] = field(default_factory=_ids)
    _top_logprobs: array[float] = field(default_factory=_floats)
    _top_counts: array[int] = field(default_factory=_ids)

    @property
    def text(self) -> str:
        """What the tokens say, as far as it is safe to send."""
        return self._text.decode()

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self._text) + 4 * (
            2 * len(self.token_ids) + 2 * len(self._top_ids) + len(self._top_counts)
        )

    def tops(self) -> Iterator[tuple[array[int], array[float]]]:
        """The top tokens of each token: ids and log probabilities."""
        at = 0
        for count in self._top_counts:
            yield self._top_ids[at : at + count], self._top_logprobs[at : at + count]
            at += count

    def add_token(self, token_id: int, logprob: float, top: Top | None) -> None:
        """One more token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if top is not None:
            self._top_ids.extend(top.token_ids)
            self._top_logprobs.extend(top.logprobs)
        self._top_counts.append(len(top.token_ids) if top is not None else 0)

    def add_text(self, text: str) -> None:
        """More text."""
        self._text += text.encode()


class Unread:
    """A sample's output between the engine and the stream.

    Args:
        paged: hand it out in pages; else all of it as one.
    """

    def __init__(self, *, paged: bool) -> None:
        self._page_bytes = _PAGE_BYTES if paged else None
        self._pages: deque[Delta] = deque()
        #: Of all pages but the last, which still grows.
        self._full_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pages)

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self._full_bytes + (self._pages[-1].size if self._pages else 0)

    def add_token(self, token_id: int, logprob: float, top: Top | None) -> None:
        """One more token."""
        self._page().add_token(token_id, logprob, top)

    def add_text(self, text: str) -> None:
        """More text."""
        self._page().add_text(text)

    def take(self) -> Delta:
        """The oldest page; empty if nothing waits."""
        if not self._pages:
            return Delta()
        page = self._pages.popleft()
        if self._pages:
            self._full_bytes -= page.size
        return page

    def clear(self) -> None:
        """Forget all of it."""
        self._pages.clear()
        self._full_bytes = 0

    def _page(self) -> Delta:
        """The page to write to."""
        pages = self._pages
        if not pages:
            pages.append(Delta())
        elif self._page_bytes is not None and pages[-1].size >= self._page_bytes:
            self._full_bytes += pages[-1].size
            pages.append(Delta())
        return pages[-1]
