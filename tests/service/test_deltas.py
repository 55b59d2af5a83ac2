"""What waits for a reader: packed small, whole and in order."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from tokenpod.core.outputs import FinishCode, Top
from tokenpod.service.calls.sample import Sample

PIECES = st.lists(
    st.tuples(
        st.integers(0, 2**32 - 1),
        st.floats(-50, 0, width=32),
        st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=70),
        st.text(max_size=20),
    ),
    max_size=60,
)


class Texts:
    """A reader of tokens whose texts are given."""

    tells = reasons = over = False
    written, stop_sequence = 0, None

    def __init__(self) -> None:
        self.next = ""

    def push(self, token_id: int, *, active: bool) -> str:
        return self.next


class Unread(Sample):
    """A sample that gets tokens with their texts."""

    def __init__(self, *, paged: bool) -> None:
        self.reader = Texts()
        super().__init__(
            index=0, sequence_id=0, reader=self.reader, streamed=paged, keep_text=False
        )

    def add(self, token_id: int, logprob: float, top: Top | None, text: str) -> None:
        self.reader.next = text
        self.push(token_id, logprob, FinishCode.RUNNING, top, 1)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(PIECES, st.booleans(), st.lists(st.booleans(), min_size=60, max_size=60))
def test_what_goes_in_comes_out_in_order_however_it_is_taken(pieces, paged, takes):
    unread, pages = Unread(paged=paged), []
    for (token, logprob, top, text), take in zip(pieces, takes, strict=False):
        made = None if top is None else Top(0, top, [-1.0] * len(top))
        unread.add(token, logprob, made, text)
        if take:
            pages.append(unread.take())
    while unread.has_news:
        pages.append(unread.take())
    assert unread.unread_bytes == 0
    assert [token for page in pages for token in page.token_ids] == [p[0] for p in pieces]
    assert [value for page in pages for value in page.logprobs] == [p[1] for p in pieces]
    assert "".join(page.text for page in pages) == "".join(p[3] for p in pieces)
    tops = [list(ids) for page in pages for ids, _ in page.tops()]
    assert tops == [p[2] or [] for p in pieces]
    for page in pages:
        assert len(page.token_ids) == len(page.logprobs) == len(list(page.tops()))


def fill(unread: Unread, size: int, top: Top | None) -> int:
    """Write until `size` bytes wait; the number of tokens."""
    tokens = 0
    while unread.unread_bytes < size:
        unread.add(tokens % 50_000, -0.5, top, "four")
        tokens += 1
    return tokens


@pytest.mark.parametrize("top", [None, Top(0, list(range(20)), list(np.linspace(-9, 0, 20)))])
def test_what_waits_takes_hardly_more_memory_than_it_says(top):
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        unread = Unread(paged=True)
        fill(unread, 128 * 1024, top)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1.4 * 128 * 1024


def test_a_page_is_a_small_message_whatever_waits():
    unread = Unread(paged=True)
    fill(unread, 100_000, None)
    sizes = []
    while unread.has_news:
        sizes.append(unread.take().size)
    assert sum(sizes) >= 100_000
    assert max(sizes) < 9_000
    assert len(sizes) > 10


def test_unpaged_output_is_one_piece():
    unread = Unread(paged=False)
    tokens = fill(unread, 100_000, None)
    assert len(unread.take().token_ids) == tokens
    assert not unread.has_news
