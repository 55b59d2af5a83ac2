"""One sample of a request: its tokens, its text, and what of them was not sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenpod.core.outputs import FinishCode, Top
from tokenpod.service.calls.deltas import Delta, Unread
from tokenpod.service.calls.parts import Kind, Part
from tokenpod.service.text.decoding import Detokenizer
from tokenpod.service.text.stops import StopMatcher
from tokenpod.service.text.turns import Turn


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sample ended."""

    reason: FinishCode
    stop_sequence: str | None = None
    stop_token_id: int | None = None


class Sample:
    """One sequence's text and tokens.

    Args:
        index: which sample of the request.
        sequence_id: its name in the engine.
        detokenizer: fresh, with the prompt's end as context; None: nobody reads the text.
        stops: fresh, with the request's stop sequences.
        min_new_tokens: stop sequences count from this many tokens on.
        streamed: hand out what comes in pages; else the whole output as one.
        offsets: note where each token's text begins.
        keep_text: the whole text is wanted at the end.
        turn: tells reasoning and calls from the text; None: all of it is text.
    """

    def __init__(
        self,
        *,
        index: int,
        sequence_id: int,
        detokenizer: Detokenizer | None,
        stops: StopMatcher,
        min_new_tokens: int,
        streamed: bool,
        offsets: bool = False,
        keep_text: bool = True,
        turn: Turn | None = None,
    ) -> None:
        self.turn = turn
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
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_new_tokens = min_new_tokens
        #: Code points that the detokenizer has brought; None: nobody asks for them.
        self._written = 0 if offsets else None
        self._keep_text = keep_text
        self._text = bytearray()
        self._unread = Unread(paged=streamed)

    @property
    def text(self) -> str:
        """All text that is safe to send; empty if it is not kept."""
        return self._text.decode()

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
        if not finish:
            self._note(token_id, logprob, top, at)
            self._read(token_id)
            if self._stops.matched is not None:
                self._end(Ending(FinishCode.STOP_TOKEN, stop_sequence=self._stops.matched))
            elif self.turn is not None and self.turn.over:
                self._end(Ending(FinishCode.EOS))
            return
        self._push_last(token_id, logprob, finish, top, at)

    def take(self) -> Delta:
        """The oldest page of what has come and was not taken yet."""
        return self._unread.take()

    @property
    def has_news(self) -> bool:
        """Whether `take` would bring anything."""
        return bool(self._unread)

    @property
    def unread_bytes(self) -> int:
        """Bytes that wait to be taken."""
        return self._unread.size

    @property
    def kept_bytes(self) -> int:
        """Bytes of the text so far, which ends the stream, and of what waits to be taken."""
        kept = self._unread.size + len(self._text)
        return kept if self.turn is None else kept + self.turn.kept_bytes

    def drop(self) -> None:
        """Forget what was not taken."""
        self._unread.clear()

    def _push_last(
        self, token_id: int, logprob: float, finish: FinishCode, top: Top | None, at: int
    ) -> None:
        if token_id >= 0:
            self._note(token_id, logprob, top, at)
        if token_id >= 0 and finish not in (FinishCode.EOS, FinishCode.STOP_TOKEN):
            self._read(token_id)
        if self._stops.matched is None and self._detokenizer is not None:
            self._emit(self._stops.push(self._detokenizer.finish()))
        if self._stops.matched is not None:
            self._end(Ending(FinishCode.STOP_TOKEN, stop_sequence=self._stops.matched))
        else:
            self._emit(self._stops.finish())
            stop_token = token_id if finish is FinishCode.STOP_TOKEN else None
            self._end(Ending(finish, stop_token_id=stop_token))

    def _end(self, ending: Ending) -> None:
        """The text is whole."""
        if self.turn is not None:
            self._tell(self.turn.finish())
        self.ending = ending

    def _read(self, token_id: int) -> None:
        """Emit what a token brings of the text."""
        if self._detokenizer is None:
            return
        text = self._detokenizer.push(token_id)
        if self._written is not None:
            self._written += len(text)
        active = self.generated >= self._min_new_tokens
        reasoned = self.turn is not None and self.turn.reasons
        self._emit(self._stops.push(text, active=active))
        if self.turn is not None and (reasoned or self.turn.reasons):
            self.reasoning_tokens += 1

    def _note(self, token_id: int, logprob: float, top: Top | None, at: int) -> None:
        self.generated += 1
        if self.drafts_to_come:
            self.drafts_to_come -= 1
            self.accepted += 1
        self.cumulative_logprob += logprob
        self.first_token_at = self.first_token_at or at
        self.last_token_at = at
        self._unread.add_token(token_id, logprob, top, self._written)

    def _emit(self, text: str) -> None:
        if self.turn is not None:
            self._tell(self.turn.push(text))
        elif text:
            encoded = text.encode()
            if self._keep_text:
                self._text += encoded
            self._unread.add_text(encoded)

    def _tell(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.kind is Kind.TEXT and self._keep_text:
                self._text += part.text.encode()
            self._unread.add_part(part)
