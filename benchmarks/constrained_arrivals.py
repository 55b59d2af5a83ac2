"""What streams feel of requests that come: of none, of plain ones, and of ones under schemas.

The three take turns, `--rounds` times. A gap counts while requests come: from when they are sent
until the last of them has ended; calm stretches have about as many steps as schemas take. The
streams' tokens come together, so a step is one gap.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from constrained_engine import Bench, schema, sizes
from constrained_turns import Turns

KINDS = "calm", "plain", "schemas"
#: Steps of a calm stretch, about as many as 200 schemas take; and between two stretches.
_CALM, _BETWEEN = 40, 4
#: Rounds whose gaps are put together for one 99th percentile: there are quartiles of those.
_TOGETHER = 6
#: Positions of a stream that are left for its end.
_SPARE = 40


class Arrivals:
    """Streams, and what comes beside them."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._schemas = bench, 10_000
        self._new = sizes(bench.asked)[0] - _SPARE
        self._streams: list[int] = []

    def begin(self) -> None:
        """Begin streams, in the place of those before."""
        bench = self._bench
        bench.end(self._streams)
        self._streams = [bench.ask(None, self._new) for _ in range(bench.asked.streams)]
        while any(len(bench.client.times[s]) < 8 for s in self._streams):
            bench.loop.turn()

    def stretch(self, kind: str) -> list[float]:
        """Milliseconds of the gaps of one stream, while requests of a kind come."""
        bench, times = self._bench, self._bench.client.times
        first = self._streams[0]
        if len(times[first]) > self._new - 600:
            self.begin()
            first = self._streams[0]
        self._turn_until(len(times[first]) + _BETWEEN)
        begun, new = len(times[first]), set[int]()
        for _ in range(bench.asked.arrivals if kind != "calm" else 0):
            self._schemas += 1
            # One token each: what is measured is their coming, and not a larger batch.
            wanted = schema(self._schemas) if kind == "schemas" else None
            new.add(bench.ask(wanted, 1, prompt=4))
        while new & bench.client.left:
            bench.loop.turn()
        if not new:
            self._turn_until(begun + _CALM)
        assert first in bench.client.left, "the streams have ended: fewer --arrivals"
        return [(b - a) * 1e3 for a, b in pairwise(times[first][begun - 1 :])]

    def end(self) -> None:
        """End the streams."""
        self._bench.end(self._streams)

    def _turn_until(self, tokens: int) -> None:
        while len(self._bench.client.times[self._streams[0]]) < tokens:
            self._bench.loop.turn()


def arrivals(bench: Bench) -> None:
    """Measure; prints what the gaps were, and where the time of steps beside schemas goes."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with torch.inference_mode():
        beside = Arrivals(bench)
        beside.begin()
        for kind in KINDS:
            beside.stretch(kind)
        for at in range(bench.asked.rounds):
            for kind in (*KINDS[at % 3 :], *KINDS[: at % 3]):
                found[kind].append(beside.stretch(kind))
        told(found)
        turns = Turns(bench)
        for _ in range(max(bench.asked.rounds // 4, 1)):
            beside.stretch("schemas")
        turns.stop()
        beside.end()
    print(turns.by_size())
    print(turns.by_part(wanted=lambda turn: "launch: new rows" in turn), flush=True)


def told(found: dict[str, list[list[float]]]) -> None:
    """Print the gaps, and how much longer those beside schemas are."""
    p99s = {}
    for kind, stretches in found.items():
        gaps = np.concatenate(stretches)
        together = [
            np.concatenate(stretches[at : at + _TOGETHER])
            for at in range(0, len(stretches), _TOGETHER)
        ]
        p99s[kind] = np.array([np.percentile(each, 99) for each in [gaps, *together]])
        low, middle, high = np.percentile(p99s[kind][1:], (25, 50, 75))
        p50, p90, p99 = np.percentile(gaps, (50, 90, 99))
        print(
            f"arrivals  {kind:8} {len(gaps):5} gaps: median {p50:.2f} p90 {p90:.2f} p99 {p99:.2f} "
            f"longest {gaps.max():.2f} ms; p99 of every {_TOGETHER} stretches: quartiles "
            f"{low:.2f} {middle:.2f} {high:.2f}",
            flush=True,
        )
    for other in ("calm", "plain"):
        more = p99s["schemas"] / p99s[other] - 1
        low, middle, high = np.percentile(more[1:], (25, 50, 75))
        print(
            f"          p99 beside schemas {more[0]:+.1%} of `{other}`; quartiles {low:+.1%}"
            f" {middle:+.1%} {high:+.1%}",
            flush=True,
        )
