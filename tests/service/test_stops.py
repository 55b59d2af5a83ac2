import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from tokenpod.service.text.reader import StopMatcher, TailStops

# Few letters, so that stops overlap, nest and nearly match all the time.
WORDS = st.text(alphabet="ab", min_size=1, max_size=6)
STOPS = st.lists(WORDS, max_size=5)
PIECES = st.lists(st.text(alphabet="abc", max_size=5), max_size=12)


def first_stop(text: str, stops: list[str], inactive: int = 0) -> tuple[int, str] | None:
    """The naive rule: the stop that ends first after `inactive` characters, then the longest."""
    for end in range(inactive + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def held_back(text: str, stops: list[str]) -> int:
    """The length of the longest end of `text` that is the beginning, not all, of a stop."""
    beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
    return max((n for n in range(1, len(text) + 1) if text[-n:] in beginnings), default=0)


@settings(max_examples=examples(1500), derandomize=True, deadline=None)
@given(STOPS, PIECES, st.booleans())
def test_every_push_emits_exactly_what_is_safe(stops, pieces, include):
    matcher = StopMatcher(stops, include=include)
    seen, emitted = "", ""
    for piece in pieces:
        seen += piece
        emitted += matcher.push(piece)
        found = first_stop(seen, stops)
        if found is None:
            assert matcher.matched is None
            assert emitted == seen[: len(seen) - held_back(seen, stops)]
        else:
            end, stop = found
            assert matcher.matched == stop
            assert emitted == seen[: end if include else end - len(stop)]
    emitted += matcher.finish()
    if matcher.matched is None:
        assert emitted == seen


@settings(max_examples=examples(1500), derandomize=True, deadline=None)
@given(STOPS, PIECES, PIECES, st.booleans())
def test_a_stop_counts_if_it_ends_in_active_text(stops, inactive, active, include):
    matcher = StopMatcher(stops, include=include)
    emitted = "".join(matcher.push(piece, active=False) for piece in inactive)
    assert matcher.matched is None
    before = "".join(inactive)
    assert emitted == before[: len(before) - held_back(before, stops)]
    emitted += "".join(matcher.push(piece) for piece in active) + matcher.finish()
    text = before + "".join(active)
    found = first_stop(text, stops, inactive=len(before))
    if found is None:
        assert (matcher.matched, emitted) == (None, text)
    else:
        end, stop = found
        # An ignored stop may have been emitted already; what was emitted stays.
        kept = text[: end if include else end - len(stop)]
        assert matcher.matched == stop
        assert emitted == kept


def test_a_stop_inside_a_piece_ends_the_text_there():
    matcher = StopMatcher(["stop"], include=False)
    assert matcher.push("go stop now") == "go "
    assert matcher.matched == "stop"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_a_stop_across_pieces_is_never_shown():
    matcher = StopMatcher(["</answer>"], include=False)
    assert [matcher.push(piece) for piece in ["42<", "/ans", "wer", ">!"]] == ["42", "", "", ""]
    assert matcher.matched == "</answer>"


def test_an_included_stop_is_the_end_of_the_text():
    matcher = StopMatcher(["。"], include=True)
    assert matcher.push("你好。再见") == "你好。"


def test_text_held_for_a_stop_that_does_not_come_is_returned_at_the_end():
    matcher = StopMatcher(["\n\nUser:"], include=False)
    assert matcher.push("fine\n\nUs") == "fine"
    assert matcher.finish() == "\n\nUs"
    assert matcher.finish() == ""


def test_an_ignored_stop_is_not_waited_for():
    matcher = StopMatcher(["\n"], include=False)
    assert matcher.push("\n", active=False) == "\n"
    assert matcher.push("a\n") == "a"


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""], include=False)


class CountingMatcher(StopMatcher):
    """Counts the transitions that are resolved: the only work that is not one step a character."""

    resolved = 0

    def _child(self, node, char, *, fallback):
        self.resolved += 1
        return super()._child(node, char, fallback=fallback)


def test_work_is_linear_for_one_long_stop_that_nearly_matches():
    stop = "a" * 20_000 + "b"
    matcher = CountingMatcher([stop], include=False)
    text = ("a" * 19_999 + "c") * 2 + "a" * 20_000
    emitted = "".join(matcher.push(text[at : at + 7]) for at in range(0, len(text), 7))
    assert emitted + matcher.finish() == text
    assert matcher.resolved < 2 * len(text)


def test_work_follows_the_text_not_ten_thousand_stops():
    rng = random.Random(5)
    stops = ["".join(rng.choices("abcd", k=240)) for _ in range(10_000)]
    matcher = CountingMatcher(stops, include=False)
    text = "".join(rng.choices("abcd", k=4_000)) + stops[77] + "tail"
    emitted = "".join(matcher.push(text[at : at + 4]) for at in range(0, len(text), 4))
    assert matcher.matched == stops[77]
    assert emitted == text[:4_000]
    assert matcher.resolved < 20 * len(text)


def tgi_reference(stops: list[str], pieces: list[str]) -> list[str | None]:
    """TGI's rule as its shard writes it: a regular expression over the recent text."""
    recent, answers = "", []
    for piece in pieces:
        recent += piece
        if len(recent) > 300:
            recent = recent[-200:]
        hits = (s for s in stops if re.match(f".*{re.escape(s)}$", recent, re.DOTALL))
        answers.append(next(hits, None))
    return answers


@settings(max_examples=examples(500), derandomize=True, deadline=None)
@given(
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4),
    st.lists(st.text(alphabet="ab\n", max_size=60), max_size=20),
)
def test_tail_stops_follow_tgis_regular_expression(stops, pieces):
    tail = TailStops(stops)
    assert [tail.push(piece) for piece in pieces] == tgi_reference(stops, pieces)


def test_tail_stops_miss_a_stop_inside_a_token():
    tail = TailStops(["stop"])
    assert tail.push("a stop.") is None
    assert tail.push(" sto") is None
    assert tail.push("p\n") == "stop"


def test_tail_stops_forget_text_beyond_the_window():
    tail = TailStops(["a" * 250])
    assert tail.push("a" * 200) is None
    assert tail.push("a" * 101) is None
