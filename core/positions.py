"""Where a request's tokens stand for rotation, where that is not their place in the sequence.

Of an image, time is the same for all of its vectors, height and width are where each is in it, and
the text behind goes on after the larger side (multimodal rotation: Wang et al. 2024, Qwen2-VL).
With 2 x 2 vectors (`axes` 0 0 0 0, 0 0 1 1, 0 1 0 1; `span` 2) behind two tokens:

    place     0  1  2  3  4  5  6  7  8
    time      0  1  2  2  2  2  4  5  6      behind the last vector that brings axes, position =
    height    0  1  2  2  3  3  4  5  6      place + shift on all of them: here the shift is -2
    width     0  1  2  3  2  3  4  5  6
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tokenpod.core.plan import Ints
from tokenpod.core.requests import GivenVectors, Request

#: Time, height and width.
AXES = 3


class PlacedVectors(NamedTuple):
    """Vectors of a prompt, and where they are."""

    given: GivenVectors
    #: The place of the first, virtual tokens counted.
    place: int
    #: By how much positions of tokens just before are further on than their places.
    shift: int

    @property
    def end(self) -> int:
        """The place behind the last."""
        return self.place + self.given.count

    @property
    def shift_behind(self) -> int:
        """The shift of tokens behind them."""
        return self.shift + (self.given.span - self.given.count if self.given.axes else 0)

    def axes(self) -> Ints:
        """[3, n] int32 positions."""
        first = self.place + self.shift
        if not self.given.axes:
            return np.tile(np.arange(first, first + self.given.count, dtype=np.int32), (AXES, 1))
        axes: Ints = np.frombuffer(self.given.axes, "<i4").reshape(AXES, -1) + np.int32(first)
        return axes


def placed_vectors(request: Request) -> Iterator[PlacedVectors]:
    """All that is given of a request, in order of place."""
    shift = 0
    for given in sorted(request.given, key=lambda given: given.start):
        placed = PlacedVectors(given, request.virtual_tokens + given.start, shift)
        yield placed
        shift = placed.shift_behind


def spans_of(request: Request) -> tuple[tuple[int, int], ...]:
    """Places, from and to, of vectors or tokens that see each other, rising."""
    if request.mutual:
        return ((0, request.positions),)
    if not request.given:
        return ()
    return tuple(
        (placed.place, placed.end) for placed in placed_vectors(request) if placed.given.mutual
    )


def shift_of(request: Request) -> int:
    """By how much positions behind the prompt are further on than places; below 0: behind."""
    return sum(given.span - given.count for given in request.given if given.axes)


def axes_of(request: Request, start: int, end: int) -> Ints | None:
    """[3, end - start] int32: positions of these places; None: all are place + `shift_of`."""
    placed = [*placed_vectors(request)]
    if start >= max((part.end for part in placed if part.given.axes), default=0):
        return None
    axes = np.tile(np.arange(start, end, dtype=np.int32), (AXES, 1))
    for part in placed:
        axes[:, max(part.end - start, 0) :] += part.shift_behind - part.shift
        first, last = max(start, part.place), min(end, part.end)
        if first < last:
            axes[:, first - start : last - start] = part.axes()[
                :, first - part.place : last - part.place
            ]
    return axes


def positions_problem(request: Request, *, served: bool) -> str:
    """Why positions that a request brings can't be; empty if they can.

    Args:
        request: the request.
        served: whether the model's rotation has three axes.
    """
    for given in request.given:
        if not given.axes:
            continue
        if not served:
            return "vectors bring positions of three axes; the model's rotation has one"
        if len(given.axes) != AXES * 4 * given.count:
            return (
                f"vectors from place {given.start} bring {len(given.axes)} bytes of positions; "
                f"{given.count} vectors have {AXES * 4 * given.count}"
            )
    return ""
