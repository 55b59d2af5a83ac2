"""One sample of a request: its tokens, what they say, and what of both was not sent yet.

What was not sent is packed, so that a reader that stops costs little memory: 8 bytes for a token
and as much for each of its top tokens, cut into pages. A message carries one page, so that catching
up never makes a large one.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenpod.core.outputs import FinishCode, Top
from tokenpod.service.calls.chats import ToolCall
from tokenpod.service.calls.parts import Kind, Part

#: What plain text is a piece of.
_TEXT = Part(Kind.TEXT, "")
#: Bytes from which on a page takes nothing more.
_PAGE_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sample ended."""

    reason: FinishCode
    stop_sequence: str | None = None
    stop_token_id: int | None = None


class Reader(Protocol):
    """Makes text of one sample's tokens."""

    #: Whether it tells reasoning and calls from text.
    tells: bool
    #: Code points that the tokens so far stand for, whether they can be sent already or not.
    written: int
    #: The stop sequence that has ended the text; None: none has.
    stop_sequence: str | None
    #: Whether what comes now is reasoning.
    reasons: bool
    #: Whether the model may write no more.
    over: bool

    def push(self, token_id: int, *, active: bool) -> str:
        """The text that a token makes safe to send. `active`: a stop sequence may end here."""

    def finish(self) -> str:
        """The text that is still held back, at its end; none behind a stop sequence."""

    def told(self, text: str) -> Sequence[Part]:
        """What more text is; where it `tells`."""

    def told_last(self) -> Sequence[Part]:
        """What has yet to be told, behind all text; where it `tells`."""


class Sample:
    """One sequence's text and tokens.

    Args:
        index: which sample of the request.
        sequence_id: its name in the engine.
        reader: fresh; None: nobody reads the text.
        min_new_tokens: stop sequences count from this many tokens on.
        streamed: hand out what comes in pages; else the whole output as one.
        offsets: note where each token's text begins.
        keep_text: the whole answer is wanted at the end: text, reasoning and calls.
    """

    def __init__(
        self,
        *,
        index: int,
        sequence_id: int,
        reader: Reader | None,
        streamed: bool,
        min_new_tokens: int = 0,
        offsets: bool = False,
        keep_text: bool = True,
    ) -> None:
        #: Tokens of reasoning, its marks included.
        self.reasoning_tokens = 0
        self.index = index
        self.sequence_id = sequence_id
        self.generated = 0
        self.cumulative_logprob = 0.0
        #: Tokens that were drafted, and those of them that are its output.
        self.drafted = self.accepted = 0
        #: How many of the tokens that come next were drafted.
        self.drafts_to_come = 0
        self.ending: Ending | None = None
        #: It has no ending: the model failed.
        self.failed = False
        #: Whether the text conforms to its constraint; None: it has none, or a stop cut it.
        self.satisfied: bool | None = None
        self.first_token_at = 0
        self.last_token_at = 0
        #: Calls of tools that have begun.
        self.calls_begun = 0
        self._reader = reader
        self._min_new_tokens = min_new_tokens
        self._offsets = offsets
        self._keep_text = keep_text
        self._text, self._reasoning = bytearray(), bytearray()
        self._calls: list[tuple[Part, bytearray]] = []
        self._page_bytes = _PAGE_BYTES if streamed else sys.maxsize
        #: What was not taken yet; the last one still grows.
        self._pages: deque[Delta] = deque()
        #: Of all pages but the last.
        self._full_bytes = 0

    @property
    def text(self) -> str:
        """All text that is safe to send; empty if it is not kept."""
        return self._text.decode()

    @property
    def reasoning(self) -> str:
        """All reasoning so far; empty if it is not kept."""
        return self._reasoning.decode()

    @property
    def calls(self) -> list[ToolCall]:
        """All calls of tools so far; empty if they are not kept."""
        return [ToolCall(p.call_id, p.name, args.decode()) for p, args in self._calls]

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the tokens: what `best_of` ranks by."""
        return self.cumulative_logprob / max(self.generated, 1)

    def score(self, length_penalty: float) -> float:
        """What the results of a beam search are ranked by."""
        divisor: float = float(self.generated) ** length_penalty
        return self.cumulative_logprob / divisor

    def push(
        self, token_id: int, logprob: float, finish: FinishCode, top: Top | None, at: int
    ) -> None:
        """Take one token, or none (-1). Sets `ending` when the sample is over."""
        if token_id >= 0:
            self._note(token_id, logprob, top, at)
        reader = self._reader
        if reader is None:
            if finish:
                self._end(finish, token_id)
            return
        if token_id >= 0 and finish not in (FinishCode.EOS, FinishCode.STOP_TOKEN):
            self._read(reader, token_id)
        if finish:
            self._add(reader, reader.finish())
            self._end(finish, token_id)
        elif reader.stop_sequence is not None or reader.over:
            self._end(FinishCode.EOS, token_id)

    def take(self) -> Delta:
        """The oldest page of what has come and was not taken yet; empty if nothing waits."""
        if not self._pages:
            return Delta()
        page = self._pages.popleft()
        if self._pages:
            self._full_bytes -= page.size
        return page

    @property
    def has_news(self) -> bool:
        """Whether `take` would bring anything."""
        return bool(self._pages)

    @property
    def unread_bytes(self) -> int:
        """Bytes that wait to be taken."""
        return self._full_bytes + (self._pages[-1].size if self._pages else 0)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the answer so far, which ends the stream, and of what waits to be taken."""
        kept = self.unread_bytes + len(self._text) + len(self._reasoning)
        return kept + sum(len(arguments) for _, arguments in self._calls)

    def drop(self) -> None:
        """Forget what was not taken."""
        self._pages.clear()
        self._full_bytes = 0

    def _end(self, finish: FinishCode, token_id: int) -> None:
        """The text is whole. A stop sequence in it counts more than what the engine says."""
        reader = self._reader
        if reader is not None and reader.tells:
            self._tell(reader.told_last())
        if reader is not None and reader.stop_sequence is not None:
            self.ending = Ending(FinishCode.STOP_TOKEN, stop_sequence=reader.stop_sequence)
        else:
            stop_token = token_id if finish is FinishCode.STOP_TOKEN else None
            self.ending = Ending(finish, stop_token_id=stop_token)

    def _read(self, reader: Reader, token_id: int) -> None:
        """Keep what a token brings of the text."""
        reasoned = reader.reasons
        self._add(reader, reader.push(token_id, active=self.generated >= self._min_new_tokens))
        if reasoned or reader.reasons:
            self.reasoning_tokens += 1

    def _note(self, token_id: int, logprob: float, top: Top | None, at: int) -> None:
        self.generated += 1
        if self.drafts_to_come:
            self.drafts_to_come -= 1
            self.accepted += 1
        self.cumulative_logprob += logprob
        self.first_token_at = self.first_token_at or at
        self.last_token_at = at
        page = self._page()
        page.add_token(token_id, logprob, top)
        if self._offsets:
            page.add_offset(self._reader.written if self._reader is not None else 0)

    def _add(self, reader: Reader, text: str) -> None:
        if not text:
            return
        if reader.tells:
            self._tell(reader.told(text))
            return
        encoded = text.encode()
        if self._keep_text:
            self._text += encoded
        # On the page of its token, where that still waits.
        (self._pages[-1] if self._pages else self._page()).add_text(encoded)

    def _tell(self, parts: Sequence[Part]) -> None:
        for part in parts:
            # Where the whole output is one page, the parts are kept apart from it.
            if self._page_bytes < sys.maxsize and not self._page().add_part(part):
                self._new_page().add_part(part)
            if part.call_id:
                self.calls_begun += 1
            if self._keep_text:
                self._keep(part)

    def _keep(self, part: Part) -> None:
        encoded = part.text.encode()
        if part.kind is Kind.TEXT:
            self._text += encoded
        elif part.kind is Kind.REASONING:
            self._reasoning += encoded
        elif part.call_id:
            self._calls.append((part, bytearray(encoded)))
        else:
            self._calls[-1][1].extend(encoded)

    def _page(self) -> Delta:
        """The page to write to."""
        if not self._pages:
            self._pages.append(Delta())
        elif self._pages[-1].size >= self._page_bytes:
            return self._new_page()
        return self._pages[-1]

    def _new_page(self) -> Delta:
        self._full_bytes += self._pages[-1].size
        self._pages.append(Delta())
        return self._pages[-1]


# -- a page of what waits for the reader of the stream ----------------------------------------


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
