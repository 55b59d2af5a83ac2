"""The text of one sample, as its tokens come: detokenised, cut at stops, told apart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from tokenpod.service.calls.parts import Part
from tokenpod.service.text.parsers.turn import TurnParser
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


# -- stop strings: where text ends, and what may be shown before that is known -----------------

_TGI_TRIM_ABOVE = 300
_TGI_TRIM_TO = 200


class _Node:
    """A state of the automaton: a prefix that the sorted stops `[low, high)` share.

    `fallback` is the longest proper suffix of the prefix that is a prefix of a stop too, and
    `match` the longest stop that the prefix ends with.
    """

    __slots__ = ("depth", "fallback", "high", "low", "match", "next")

    def __init__(
        self, low: int, high: int, depth: int, fallback: _Node | None, match: str | None
    ) -> None:
        self.low = low
        self.high = high
        self.depth = depth
        self.fallback = fallback
        self.match = match
        self.next: dict[str, _Node] = {}


class StopMatcher:
    """Find the first stop string in a stream of text, and hold back what may become one.

    Of the stops in the text the one that ends first is matched; of several that end there, the
    longest. It is found wherever it begins and ends, inside a piece or across pieces. The stop is
    part of the text only with `include`; what follows it never is.

    This is Aho and Corasick's automaton, made as the text visits it: the constructor only sorts,
    and time and memory follow the text, not the size of the stops. What is held back is always
    the prefix that the current state stands for, so there is no buffer to copy.

    Libraries (pyahocorasick, ahocorasick-rs) tell matches, but not how much of a text's end may yet
    become one, which is what must be held back.

    ValueError: a stop is empty.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        if "" in stops:
            raise ValueError("a stop sequence is empty")
        self._stops = sorted(set(stops))
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._root = _Node(0, len(self._stops), 0, None, None)
        self._state = self._root
        self.matched: str | None = None

    def push(self, text: str, *, active: bool = True) -> str:
        """Return the text that is now safe to emit: no part of it can become part of a stop.

        With `active=False` (before `min_new_tokens`) a stop that ends in `text` is ignored. Such
        text is held back all the same: a stop that begins in it and ends in active text counts.
        """
        if self.matched is not None:
            return ""
        held = state = self._state
        if held is self._root and self._first_chars.isdisjoint(text):
            return text
        for position, char in enumerate(text):
            state = state.next.get(char) or self._visit(state, char)
            if state.match is not None and active:
                return self._close(state.match, held.depth + position + 1, text)
        while self._cannot_grow(state) and state.fallback is not None:
            state = state.fallback
        self._state = state
        return self._joined(held, text, held.depth + len(text) - state.depth)

    def finish(self) -> str:
        """Return what is held back, when the sequence ended without a stop."""
        held, self._state = self._state, self._root
        return self._joined(held, "", held.depth)

    def _close(self, match: str, end: int, text: str) -> str:
        held, self._state = self._state, self._root
        self.matched = match
        return self._joined(held, text, end if self._include else end - len(match))

    def _joined(self, held: _Node, text: str, length: int) -> str:
        """Return the first `length` characters of the held back text followed by `text`."""
        if length <= held.depth:
            return self._stops[held.low][:length] if length else ""
        return self._stops[held.low][: held.depth] + text[: length - held.depth]

    def _cannot_grow(self, node: _Node) -> bool:
        """Whether `node` is a whole stop and no longer one starts with it.

        Only a match that was ignored leads here: it is text now, there is nothing to wait for.
        """
        return node.high - node.low == 1 and len(self._stops[node.low]) == node.depth

    def _visit(self, node: _Node, char: str) -> _Node:
        """Return the state that follows `node` on `char`, for the first time.

        The transitions that it depends on are those of the fallbacks; each is resolved once, the
        shortest first. A loop, since a chain of fallbacks can be as long as a stop.
        """
        unresolved = [node]
        while node.fallback is not None:
            node = node.fallback
            if char in node.next:
                break
            unresolved.append(node)
        target = node.next.get(char, self._root)
        for node in reversed(unresolved):
            target = self._child(node, char, fallback=target) or target
            node.next[char] = target
        return target

    def _child(self, node: _Node, char: str, *, fallback: _Node) -> _Node | None:
        depth = node.depth
        # A stop that ends at this node sorts first, and has no character here.
        low = node.low + (len(self._stops[node.low]) == depth)

        def char_here(stop: str) -> str:
            return stop[depth]

        low = bisect_left(self._stops, char, low, node.high, key=char_here)
        high = bisect_right(self._stops, char, low, node.high, key=char_here)
        if low == high:
            return None
        whole = self._stops[low]
        match = whole if len(whole) == depth + 1 else fallback.match
        return _Node(low, high, depth + 1, fallback, match)


class TailStops:
    """TGI's own rule for stop strings, which its shard rpcs keep.

    A stop counts only where a token's text ends, or just before a newline that ends it, and
    within the recent text: once that exceeds 300 characters the last 200 are kept. The stop stays
    in the text, so nothing is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._endings = tuple((stop, (stop, stop + "\n")) for stop in stops)
        self._any_ending = tuple(ending for _, endings in self._endings for ending in endings)
        self._recent = ""

    def push(self, text: str) -> str | None:
        """Add the text of one token; return the first stop listed that the text ends with."""
        self._recent += text
        if len(self._recent) > _TGI_TRIM_ABOVE:
            self._recent = self._recent[-_TGI_TRIM_TO:]
        if not self._recent.endswith(self._any_ending):
            return None
        return next(stop for stop, endings in self._endings if self._recent.endswith(endings))
