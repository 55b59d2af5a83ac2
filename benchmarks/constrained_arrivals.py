"""What streams feel of requests that come: of none, of plain ones, and of ones under schemas.

The three take turns, `--rounds` times. A gap counts while requests come: from when they are sent
until the last of them has ended; calm stretches have about as many steps as schemas take. The
streams' tokens come together, so a step is one gap. They begin anew in each round: longer contexts
make longer steps.

`hostile` ones are constraints that would take the library minutes or end it: all are refused.
"""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import torch
from constrained_engine import Bench, schema, sizes
from constrained_turns import Turns

from tokenpod.core.constraints import Constraint, JsonSchema

KINDS = "calm", "plain", "schemas", "hostile"
#: Steps of a calm stretch, about as many as 200 schemas take; and between two stretches.
_CALM, _BETWEEN = 50, 4
#: Hostile requests of a stretch; the first takes too long, the second lets the stack overflow.
_HOSTILE = 4
#: Rounds whose gaps are put together for one 99th percentile: there are quartiles of those.
_TOGETHER = 6
#: Positions of a stream that are left for its end.
_SPARE = 40


def hostile(number: int) -> Constraint:
    """One of its own."""
    if number % 2:
        each = [{"type": "integer", "multipleOf": n} for n in (97, 101, 103, 107 + number)]
        return JsonSchema(json.dumps({"allOf": each}))
    row = [
        {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}}
        for i in range(3000 + number % 1000)
    ]
    last = {str(len(row)): {"type": "integer"}}
    defs = {str(i): each for i, each in enumerate(row)} | last
    return JsonSchema(json.dumps({"$ref": "#/$defs/0", "$defs": defs}))


class Arrivals:
    """Streams, and what comes beside them."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._number = bench, 10_000
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
        first, asked = self._streams[0], self._asked(kind)  # made before gaps count
        self._turn_until(len(times[first]) + _BETWEEN)
        begun = len(times[first])
        # One token each: what is measured is their coming, and not a larger batch.
        new = {bench.ask(each, 1, prompt=4) for each in asked}
        while new & bench.client.left:
            bench.loop.turn()
        if not new:
            self._turn_until(begun + _CALM)
        assert first in bench.client.left, "the streams have ended: fewer --arrivals"
        if kind == "hostile":
            assert len(bench.client.refused) == len(new), bench.client.refused
            bench.client.refused.clear()
        return [(b - a) * 1e3 for a, b in pairwise(times[first][begun - 1 :])]

    def _asked(self, kind: str) -> list[Constraint | None]:
        """What the requests of a stretch ask for."""
        count = {"calm": 0, "hostile": _HOSTILE}.get(kind, self._bench.asked.arrivals)
        first, self._number = self._number, self._number + count
        made = {"schemas": schema, "hostile": hostile}.get(kind, lambda number: None)
        return [made(number) for number in range(first, self._number)]

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
            beside.begin()
            # Hostile ones take long to be refused: some of them will do.
            kinds = KINDS[: None if at % 6 == 0 else -1]
            for kind in (*kinds[at % len(kinds) :], *kinds[: at % len(kinds)]):
                found[kind].append(beside.stretch(kind))
        told(found)
        turns = Turns(bench)
        for _ in range(max(bench.asked.rounds // 4, 1)):
            beside.begin()
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
    for kind, other in (("schemas", "calm"), ("schemas", "plain"), ("hostile", "calm")):
        n = min(len(p99s[kind]), len(p99s[other]))
        more = p99s[kind][:n] / p99s[other][:n] - 1
        low, middle, high = np.percentile(more[1:], (25, 50, 75))
        print(
            f"          p99 beside {kind} {more[0]:+.1%} of `{other}`; quartiles {low:+.1%}"
            f" {middle:+.1%} {high:+.1%}",
            flush=True,
        )
