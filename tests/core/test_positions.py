"""Positions of three axes: what a request brings, and what follows of it."""

from __future__ import annotations

import numpy as np

from tokenpod.core.positions import axes_of, positions_problem, shift_of
from tokenpod.core.requests import GivenVectors, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams

#: A grid of 2 rows and 3 columns.
GRID = [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]


def image(start: int, axes: list[list[int]] = GRID, span: int = 3, count: int = 6) -> GivenVectors:
    return GivenVectors(
        start, np.zeros((count, 2), np.float32), np.array(axes, "<i4").tobytes(), span
    )


def request(*given: GivenVectors, tokens: int = 20, virtual: int = 0) -> Request:
    return Request(
        [1],
        [0] * tokens,
        SamplingParams(),
        StoppingParams(1),
        given=list(given),
        virtual_tokens=virtual,
    )


def test_text_goes_on_behind_the_larger_side_of_an_image():
    asked = request(image(2), image(10))
    axes = axes_of(asked, 0, 16)
    assert axes is not None
    assert axes.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 7, 7, 7, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 7, 8, 8, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 7, 8, 9],
    ]
    # Behind the last image a number per sequence says it all.
    assert axes_of(asked, 16, 20) is None
    assert shift_of(asked) == -6


def test_any_piece_of_a_prompt_has_the_positions_that_the_whole_has():
    asked = request(image(10), image(2), virtual=3)  # in any order
    whole = axes_of(asked, 0, 23)
    assert whole is not None
    assert whole[:, 19:].tolist() == [[*range(13, 17)]] * 3
    for start in range(19):
        for end in range(start + 1, 23):
            piece = axes_of(asked, start, end)
            assert piece is not None
            assert piece.tolist() == whole[:, start:end].tolist()


def test_vectors_without_axes_stand_where_tokens_do():
    plain = GivenVectors(1, np.zeros((3, 2), np.float32))
    assert axes_of(request(plain), 0, 8) is None
    assert shift_of(request(plain)) == 0
    behind = GivenVectors(8, plain.rows)
    axes = axes_of(request(image(0), behind, image(14)), 6, 14)
    assert axes is not None
    assert axes.tolist() == [[*range(3, 11)]] * 3


def test_positions_that_cannot_be_are_named():
    assert positions_problem(request(image(0)), served=True) == ""
    assert "rotation has one" in positions_problem(request(image(0)), served=False)
    short = image(4, [[0], [0], [0]])
    assert positions_problem(request(short), served=True) == (
        "vectors from place 4 bring 12 bytes of positions; 6 vectors have 72"
    )
    none = GivenVectors(0, np.zeros((3, 2), np.float32))
    assert positions_problem(request(none), served=False) == ""
