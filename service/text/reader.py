"""The text of one sample, as its tokens come: detokenised, cut at stops, told apart."""

from __future__ import annotations

from collections.abc import Sequence

from tokenpod.service.calls.parts import Part
from tokenpod.service.text.parsers.turn import TurnParser
from tokenpod.service.text.stops import StopMatcher
from tokenpod.service.text.tokenizers.decoding import Detokenizer


class TextReader:
    """Makes an answer of its tokens.

    Args:
        detokenizer: fresh, with the prompt's end as context.
        stops: fresh, with the request's stop sequences; None: it has none.
        parser: fresh; tells reasoning and calls from the text. None: all of it is text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher | None = None,
        parser: TurnParser | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._parser = parser
        self.tells = parser is not None
        self.written = 0
        self.reasons = parser is not None and parser.reasons
        self.over = False
        self.stop_sequence: str | None = None

    def push(self, token_id: int, *, active: bool) -> str:
        """The text that a token makes safe to send. `active`: a stop sequence may end here."""
        text = self._detokenizer.push(token_id)
        self.written += len(text)
        return text if self._stops is None else self._without_stop(text, active=active)

    def finish(self) -> str:
        """The text that is still held back, at its end; none behind a stop sequence."""
        if self.stop_sequence is not None:
            return ""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        text = self._without_stop(text, active=True)
        return text if self.stop_sequence is not None else text + self._stops.finish()

    def told(self, text: str) -> Sequence[Part]:
        """What more text is; where it `tells`."""
        assert self._parser is not None
        parts = self._parser.push(text)
        self.reasons, self.over = self._parser.reasons, self._parser.over
        return parts

    def told_last(self) -> Sequence[Part]:
        """What has yet to be told, behind all text; where it `tells`."""
        assert self._parser is not None
        return self._parser.finish()

    def _without_stop(self, text: str, *, active: bool) -> str:
        assert self._stops is not None
        text = self._stops.push(text, active=active)
        self.stop_sequence = self._stops.matched
        return text
