"""Where the loop's thread spends a turn: each part's own time, without that of parts inside it."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np


class TurnTimes:
    """Times methods of objects or classes, turn by turn, until `stop` is called.

    Args:
        turn: object and name of the method that is one turn.
    """

    def __init__(self, turn: tuple[Any, str]) -> None:
        #: By part, milliseconds of each turn.
        self.turns: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        #: Time of parts inside each part under way.
        self._inside: list[float] = []
        self._patched: list[tuple[Any, str, Any]] = []
        self._patch(*turn, self._turn)

    def part(self, owner: Any, method: str, name: str = "") -> None:
        """Time this method as a part."""
        self._patch(owner, method, functools.partial(self._part, name or method))

    def replace(self, owner: Any, method: str, new: Callable[..., Any]) -> None:
        """Have another method in the place of this one."""
        self._patched.append((owner, method, getattr(owner, method)))
        setattr(owner, method, new)

    def note(self, name: str, milliseconds: float) -> None:
        """Count what was timed otherwise to this turn."""
        self._now[name] += milliseconds

    def stop(self) -> None:
        """Leave the methods as they were."""
        for owner, method, before in reversed(self._patched):
            setattr(owner, method, before)

    def report(self, wanted: Callable[[dict[str, float]], bool] = bool) -> str:
        """A line per part: mean, median and 95th percentile of the turns that are wanted."""
        turns = [turn for turn in self.turns if wanted(turn)]
        names = sorted({name for turn in turns for name in turn})
        lines = [f"    {'part':24} {'mean':>7} {'median':>7} {'p95':>7} ms of {len(turns)} turns"]
        for name in sorted(names, key=lambda name: -sum(turn.get(name, 0.0) for turn in turns)):
            values = np.array([turn.get(name, 0.0) for turn in turns])
            p95 = np.percentile(values, 95)
            lines.append(f"    {name:24} {values.mean():7.3f} {np.median(values):7.3f} {p95:7.3f}")
        return "\n".join(lines)

    def _patch(self, owner: Any, method: str, around: Callable[..., Any]) -> None:
        before = getattr(owner, method)

        @functools.wraps(before)
        def timed(*args: Any, **more: Any) -> Any:
            return around(before, *args, **more)

        self.replace(owner, method, timed)

    def _turn(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self._now = defaultdict(float)
        began = time.perf_counter()
        try:
            return self._part("(the rest of the turn)", call, *args, **more)
        finally:
            self._now["(turn)"] = (time.perf_counter() - began) * 1e3
            self.turns.append(self._now)

    def _part(self, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self._inside.append(0.0)
        began = time.perf_counter()
        try:
            return call(*args, **more)
        finally:
            took = (time.perf_counter() - began) * 1e3
            self._now[name] += took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took
