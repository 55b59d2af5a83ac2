"""Who counts as lost: time in which the listener itself did not run does not count."""

from __future__ import annotations

from tokenpod.core.silence import BEAT_SECONDS, Silence

PATIENCE = 5 * BEAT_SECONDS


def ticks(silence: Silence[str], n: int) -> list[str]:
    gone: list[str] = []
    for _ in range(n):
        gone = silence.tick(PATIENCE)
    return gone


def test_who_says_nothing_for_its_patience_is_lost() -> None:
    silence = Silence[str]()
    silence.watch("a")
    assert ticks(silence, 5) == []
    assert ticks(silence, 1) == ["a"]


def test_a_word_counts_from_anew() -> None:
    silence = Silence[str]()
    silence.watch("a")
    silence.watch("b")
    ticks(silence, 5)
    silence.heard("a")
    assert ticks(silence, 1) == ["b"]


def test_nobody_is_blamed_who_is_not_watched() -> None:
    silence = Silence[str]()
    silence.heard("a")
    assert ticks(silence, 9) == []
    silence.watch("a")
    silence.forget("a")
    assert ticks(silence, 9) == []


def test_patience_may_change() -> None:
    silence = Silence[str]()
    silence.watch("a")
    ticks(silence, 3)
    assert silence.tick(10 * PATIENCE) == []
    assert silence.tick(3 * BEAT_SECONDS) == ["a"]


def test_what_was_forgiven_does_not_count() -> None:
    silence = Silence[str]()
    silence.watch("a")
    ticks(silence, 5)
    silence.forgive()
    assert ticks(silence, 5) == []
    assert ticks(silence, 1) == ["a"]
