"""Who counts as lost: time in which the listener itself did not run does not count."""

from __future__ import annotations

from tokenpod.core.silence import BEAT_SECONDS, Listening, Silence

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


SECOND = 1_000_000_000


def ticked(*at: float) -> Listening:
    """A listener that ticks every second, at these times."""
    listening = Listening(1.0, 0)
    for each in at:
        listening.tick(int(each * SECOND))
    return listening


def test_a_listener_that_runs_on_schedule_has_listened_all_the_time() -> None:
    listening = ticked(1, 2, 3.5, 5, 6)
    assert listening.seconds(since=0) == 6
    assert listening.seconds(since=int(4.5 * SECOND)) == 1.5


def test_time_beyond_two_periods_is_lost() -> None:
    listening = ticked(1, 2, 45)
    assert listening.seconds(since=0) == 4
    # What is stamped within that time has been read behind it.
    assert listening.seconds(since=10 * SECOND) == 0
    listening.tick(46 * SECOND)
    assert listening.seconds(since=10 * SECOND) == 1
    assert listening.seconds(since=3 * SECOND) == 2


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    listening = ticked(1, 10, 11, 20)
    listening.forget(before=11 * SECOND)
    assert listening.seconds(since=11 * SECOND) == 2
    assert len(listening._lost) == 1
