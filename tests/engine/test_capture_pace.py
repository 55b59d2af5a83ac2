"""Which shapes of images are captured: those that come back soon, and no more than time allows."""

from __future__ import annotations

import itertools
import random

import torch

from tokenpod.engine.images.capture_pace import SAVED_SECONDS, SHARE, SOON, CapturePace
from tokenpod.engine.images.captured_layers import CapturedLayers

#: Of an image that is called as it is, and more where it is captured.
IMAGE, CAPTURE = 0.02, 0.03


class Tower:
    """Images of shapes by their numbers, one after the other, and what was captured when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = CapturePace(lambda: self.now)
        self.captured: list[float] = []

    def images(self, shapes: list[int], kept: int = 8) -> None:
        """So many shapes are kept, those that came last."""
        known: list[int] = []
        for shape in shapes:
            self.pace.begin()
            self.now += IMAGE
            if shape in known:
                known.remove(shape)
            elif not self.pace.worth(shape):
                continue
            else:
                self.pace.took(CAPTURE)
                self.captured.append(self.now)
            known = [*known[-kept + 1 :], shape]


def test_a_shape_is_captured_when_it_comes_back_soon() -> None:
    tower = Tower()
    tower.images([1, 2, 1, *range(3, 1 + SOON), 2])
    assert len(tower.captured) == 2
    tower = Tower()
    tower.images([1, *range(2, 2 + SOON), 1])
    assert not tower.captured


def test_ever_other_shapes_are_never_captured() -> None:
    tower = Tower()
    tower.images([*range(1000)])
    assert not tower.captured


def test_captures_take_no_more_than_their_share() -> None:
    """Of more shapes than are kept, by turns and at random."""
    by_turns = [*itertools.islice(itertools.cycle(range(12)), 3000)]
    at_random = random.Random(1).choices(range(20), k=3000)
    for shapes in (by_turns, at_random):
        tower = Tower()
        tower.images(shapes)
        assert 0 < len(tower.captured) * CAPTURE <= SAVED_SECONDS + CAPTURE + SHARE * tower.now


def test_a_quiet_hour_saves_up_no_more_than_a_moment() -> None:
    tower = Tower()
    tower.images([*range(12)] * 20)
    before, tower.now = len(tower.captured), tower.now + 3600
    tower.images([*range(12)] * 4)
    assert len(tower.captured) - before <= (SAVED_SECONDS + SHARE * 48 * IMAGE) / CAPTURE + 1


def test_what_came_longest_ago_makes_room() -> None:
    layer = torch.nn.Linear(4, 4)
    calls = CapturedLayers(torch.device("cpu"), most_bytes=400_000)
    for turn in range(24):
        calls.begin()
        with torch.inference_mode():
            calls.call(0, layer, (torch.ones(turn % 4 + 1, 4),), {})
        assert sum(shape.nbytes for shape in calls.shapes[:-1]) <= 400_000
    assert len(calls.shapes) == 3
