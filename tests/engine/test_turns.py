"""How long parts of images are, between steps."""

from __future__ import annotations

import threading

from tokenpod.engine.images.turns import PieceTimes, Turns


def test_pieces_are_as_many_as_the_time_is_known_to_take() -> None:
    times = PieceTimes()
    assert times.pieces(1000, 10_000) == 1, "nothing is known"
    times.note(1000, 4, 8_000)
    assert times.pieces(900, 10_000) == 5
    assert times.pieces(100, 10_000) == 5, "a smaller image takes no longer"
    assert times.pieces(2100, 10_000) == 1, "attention of a larger one may take much longer"
    assert times.pieces(2100, 100_000) == 3
    assert times.pieces(900, 1) == 1
    assert times.pieces(900, None) == 0, "without a bound all of an image is computed"


def test_a_thread_works_only_while_it_is_granted_time() -> None:
    turns, done = Turns(on_gpu=False), []

    def work() -> None:
        turns.begin(64)
        for at in range(6):
            done.append(at)
            turns.piece()
        turns.end()

    thread = threading.Thread(target=work)
    thread.start()
    grants = 0
    while thread.is_alive():
        if turns.waiting:
            before = len(done)
            turns.grant(1)
            grants += 1
            assert len(done) <= before + 1
    assert (grants, done) == (7, [*range(6)])
