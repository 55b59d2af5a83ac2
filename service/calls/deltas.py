"""What a stream has not sent yet, packed, so that a reader that stops costs little memory.

Tokens are packed, 8 bytes each and as much for each of their top tokens, and cut into pages. A
message carries one page, so that catching up never makes a large one.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from tokenpod.core.outputs import Top
from tokenpod.service.calls.parts import Kind, Part

#: What plain text is a piece of.
_TEXT = Part(Kind.TEXT, "")
#: Bytes from which on a page takes nothing more.
_PAGE_BYTES = 8 * 1024


class Delta:
    """A run of a sample's output. `token_ids`, `logprobs` and `tops` have one entry per token."""

    __slots__ = (
        *("_ranks", "_text", "_top_counts", "_top_ids", "_top_logprobs"),
        *("logprobs", "offsets", "part", "token_ids"),
    )

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.logprobs = array("f")
        #: Where each token's text begins, in code points; None: not asked for.
        self.offsets: array[int] | None = None
        self._text = bytearray()
        #: What `text` is a piece of: the part that it began with; None: plain text.
        self.part: Part | None = None
        #: All top tokens, one token's after the other's, and how many each token has; none of it
        #: exists where none were asked for: most streams make one of these objects per token.
        self._top_ids: array[int] | None = None
        self._top_logprobs: array[float] = self.logprobs
        self._top_counts: array[int] = self.token_ids
        self._ranks: array[int] = self.token_ids

    @property
    def text(self) -> str:
        """Text of the tokens, as far as it can be sent."""
        return self._text.decode()

    @property
    def size(self) -> int:
        """Bytes."""
        size = len(self._text) + 8 * len(self.token_ids)
        if self.offsets is not None:
            size += 4 * len(self.offsets)
        if self._top_ids is not None:
            size += 8 * len(self._top_ids) + 8 * len(self._top_counts)
        return size

    def tops(self) -> Iterator[tuple[array[int], array[float]]]:
        """The top tokens of each token: ids and log probabilities."""
        if self._top_ids is None:
            for _ in self.token_ids:
                yield array("I"), array("f")
            return
        at = 0
        for count in self._top_counts:
            yield self._top_ids[at : at + count], self._top_logprobs[at : at + count]
            at += count

    def ranks(self) -> Sequence[int]:
        """The rank of each token; 0: not known."""
        return bytes(len(self.token_ids)) if self._top_ids is None else self._ranks

    def add_token(self, token_id: int, logprob: float, top: Top | None) -> None:
        """One more token."""
        if top is not None or self._top_ids is not None:
            self._add_top(top)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

    def add_offset(self, offset: int) -> None:
        """Where the text of the last token begins."""
        if self.offsets is None:
            self.offsets = array("I")
        self.offsets.append(offset)

    def add_text(self, text: bytes) -> None:
        """More text, in UTF-8."""
        self._text += text

    def add_part(self, part: Part) -> bool:
        """A piece of text, reasoning or a call; whether it may share this run's."""
        if self.part is None and not self._text:
            self.part = part if part.kind is not Kind.TEXT else None
        else:
            last = self.part or _TEXT
            if part.call_id or (part.kind, part.call) != (last.kind, last.call):
                return False
        self._text += part.text.encode()
        return True

    def _add_top(self, top: Top | None) -> None:
        if self._top_ids is None:
            self._top_ids, self._top_logprobs = array("I"), array("f")
            self._top_counts = array("I", bytes(4 * len(self.token_ids)))
            self._ranks = array("I", bytes(4 * len(self.token_ids)))
        if top is not None:
            self._top_ids.extend(top.token_ids)
            self._top_logprobs.extend(top.logprobs)
        self._top_counts.append(len(top.token_ids) if top is not None else 0)
        self._ranks.append(top.rank if top is not None else 0)


class Unread:
    """A sample's output between the engine and the stream.

    Args:
        paged: hand it out in pages; else all of it as one.
    """

    def __init__(self, *, paged: bool) -> None:
        self._page_bytes = _PAGE_BYTES if paged else sys.maxsize
        self._pages: deque[Delta] = deque()
        #: Of all pages but the last, which still grows.
        self._full_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pages)

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self._full_bytes + (self._pages[-1].size if self._pages else 0)

    def add_token(
        self, token_id: int, logprob: float, top: Top | None, offset: int | None = None
    ) -> None:
        """One more token, whose text begins at `offset`; None: that is of no interest."""
        page = self._page()
        page.add_token(token_id, logprob, top)
        if offset is not None:
            page.add_offset(offset)

    def add_text(self, text: bytes) -> None:
        """More text, in UTF-8."""
        self._page().add_text(text)

    def add_part(self, part: Part) -> None:
        """A piece of text, reasoning or a call, which has no other on its page.

        Where the whole output is one page, the sample has the parts.
        """
        if self._page_bytes == sys.maxsize:
            return
        if not self._page().add_part(part):
            self._new_page().add_part(part)

    def take(self) -> Delta:
        """The oldest page; empty if nothing waits."""
        if not self._pages:
            return Delta()
        page = self._pages.popleft()
        if self._pages:
            self._full_bytes -= page.size
        return page

    def clear(self) -> None:
        """Drop all pages."""
        self._pages.clear()
        self._full_bytes = 0

    def _page(self) -> Delta:
        """The page to write to."""
        pages = self._pages
        if not pages:
            pages.append(Delta())
            return pages[0]
        last = pages[-1]
        size = last.size
        if size < self._page_bytes:
            return last
        return self._new_page()

    def _new_page(self) -> Delta:
        self._full_bytes += self._pages[-1].size
        self._pages.append(Delta())
        return self._pages[-1]
