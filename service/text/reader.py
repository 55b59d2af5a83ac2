"""The text of one sample, as its tokens come: detokenised, cut at stops, told apart."""

from __future__ import annotations

from collections.abc import Sequence

from tokenpod.service.calls.parts import Kind, Part
from tokenpod.service.text.decoding import Detokenizer
from tokenpod.service.text.parsers.turn import TurnParser
from tokenpod.service.text.stops import StopMatcher


class TextReader:
    """Makes the parts of an answer from its tokens.

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

    @property
    def stop_sequence(self) -> str | None:
        """The stop sequence that has ended the text; None: none has."""
        return None if self._stops is None else self._stops.matched

    @property
    def reasons(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._parser is not None and self._parser.reasons

    @property
    def over(self) -> bool:
        """Whether the model may write no more."""
        return self._parser is not None and self._parser.over

    def push(self, token_id: int, *, active: bool) -> Sequence[Part]:
        """What a token brings. `active`: a stop sequence may end here."""
        text = self._detokenizer.push(token_id)
        self.written += len(text)
        return self._parts(text if self._stops is None else self._stops.push(text, active=active))

    def finish(self, *, whole: bool) -> Sequence[Part]:
        """What is still held back; `whole`: the text has not been cut. The last call."""
        parts = list[Part]()
        if whole and self.stop_sequence is None:
            parts += self._parts(self._last_text())
        if self._parser is not None:
            parts += self._parser.finish()
        return parts

    def _last_text(self) -> str:
        text, stops = self._detokenizer.finish(), self._stops
        if stops is None:
            return text
        text = stops.push(text)
        return text if stops.matched is not None else text + stops.finish()

    def _parts(self, text: str) -> Sequence[Part]:
        if not text:
            return ()
        return (Part(Kind.TEXT, text),) if self._parser is None else self._parser.push(text)
