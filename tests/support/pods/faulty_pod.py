"""`tokenpod serve` with code that raises where texts are read: `python faulty_pod.py serve ...`.

The parser of tool calls raises at a turn's first character. In the shard rpcs a request with the
stop sequence `RAISES` raises at its second token.
"""

from __future__ import annotations

import string
import sys

from tokenpod.service.serving import routed
from tokenpod.service.text.parsers import turn
from tokenpod.service.text.parsers.calls import Calls
from tokenpod.service.text.parsers.grammar import Grammar, Source
from tokenpod.service.text.parsers.json_calls import Hermes
from tokenpod.service.text.reader import TailStops
from tokenpod_client.cli.app import main

#: The stop sequence, and a text that only the log may show.
RAISES, SECRET = "RAISES", "a secret of the call"


class RaisingCalls(Hermes):
    """Named as the one whose place it takes."""

    openings = string.printable

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """Never read anything."""
        raise OverflowError(SECRET)
        yield


class RaisingStops(TailStops):
    """Raises at the second token, if it has the stop sequence to do so."""

    def __init__(self, sequences: list[str]) -> None:
        super().__init__(sequences)
        self._left = 2 if RAISES in sequences else 0

    def push(self, text: str) -> str | None:
        """As any other, or not at all."""
        self._left -= 1
        if not self._left:
            raise OverflowError(SECRET)
        return super().push(text)


if __name__ == "__main__":
    turn.CALL_FORMATS = (RaisingCalls(),)
    routed.TailStops = RaisingStops  # type: ignore[misc]
    sys.exit(main())
