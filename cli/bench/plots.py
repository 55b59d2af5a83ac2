"""The report as pictures. Importing this module needs matplotlib: the extra `bench`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tokenpod_client.cli.bench.figures import LATENCIES, Record, values
from tokenpod_client.cli.bench.fleet import Measured
from tokenpod_client.cli.bench.report import LevelReport

_DPI = 130
#: Of a timeline: bins at most, and seconds of one at least.
_BINS, _BIN_SECONDS = 120, 0.1


def plot(folder: Path, levels: list[tuple[Measured, LevelReport]]) -> list[Path]:
    """Write every picture that these levels allow into a folder that exists; their paths.

    docs/benchmarking.md says what they show.
    """
    several = len(levels) > 1
    pictures = {"latency.png": _distributions([measured for measured, _ in levels])}
    for number, (measured, _) in enumerate(levels, 1):
        pictures[f"timeline-{number}.png" if several else "timeline.png"] = _timeline(measured)
    if several:
        pictures["sweep.png"] = _sweep([report for _, report in levels])
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=_DPI)
    return [folder / name for name in pictures]


def _distributions(levels: list[Measured]) -> Figure:
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axis, (kind, title) in zip(figure.subplots(2, 2).flat, LATENCIES.items(), strict=True):
        for measured in levels:
            found = values(measured.good, kind) * 1e3
            if len(found):
                axis.ecdf(found, label=measured.level.load.name)
        axis.set(title=title.capitalize(), xlabel="ms", ylabel="share of values", ylim=(0, 1.02))
        _finish(axis)
    return figure


def _timeline(measured: Measured) -> Figure:
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.set(title=measured.level.load.name, ylabel="requests in flight")
    below.set(xlabel="seconds", ylabel="output tokens/s")
    if measured.requests:
        moments, flying = in_flight(measured.requests)
        above.step(moments, flying, where="post")
        edges, rate = token_rate(measured.requests)
        below.stairs(rate, edges)
    for axis in (above, below):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    return figure


def in_flight(records: list[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Moments in seconds, and how many requests were in flight from each one on."""
    moments = np.concatenate([values(records, "sent"), values(records, "ended")])
    change = np.repeat([1.0, -1.0], len(records))
    order = np.argsort(moments, kind="stable")
    return moments[order], np.cumsum(change[order])


def token_rate(records: list[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Edges in seconds, and output tokens/s between two of them, failed requests' included."""
    came = np.concatenate([record.arrivals for record in records])
    end = values(records, "ended").max()
    bins = max(1, min(_BINS, int(end / _BIN_SECONDS)))
    counts, edges = np.histogram(came["time"], bins, (0.0, end), weights=came["tokens"] * 1.0)
    return edges, counts / np.diff(edges)


def _sweep(reports: list[LevelReport]) -> Figure:
    figure = Figure(figsize=(10, 7), layout="constrained")
    throughput, good, first, between = figure.subplots(2, 2).flat
    shapes = [report.load for report in reports]
    loads = [s.concurrency if s.mode == "closed" else s.request_rate for s in shapes]
    # All at once has no place on an axis of rates: the loads then stand side by side.
    known = [load for load in loads if load is not None]
    at = known if len(known) == len(loads) else list(range(len(loads)))
    throughput.plot(at, [r.throughput.output_tokens_per_s for r in reports], marker="o")
    throughput.set(title="Output tokens/s")
    good.plot(at, [r.throughput.requests_per_s for r in reports], marker="o", label="succeeded")
    if all(r.goodput for r in reports):
        kept = [r.goodput.requests_per_s for r in reports if r.goodput]
        good.plot(at, kept, marker="s", label="within the bounds")
    good.set(title="Requests/s")
    for axis, kind in ((first, "ttft"), (between, "itl")):
        for share in ("p50", "p95", "p99"):
            found = [getattr(getattr(r.latency_s, kind), share) for r in reports]
            in_ms = [np.nan if value is None else value * 1e3 for value in found]
            axis.plot(at, in_ms, marker="o", label=share)
        axis.set(title=f"{LATENCIES[kind].capitalize()}, ms")
    for axis in (throughput, good, first, between):
        axis.set_xticks(at, [load.name for load in shapes], rotation=20, ha="right")
        axis.set_ylim(bottom=0)
        _finish(axis)
    return figure


def _finish(axis: Axes) -> None:
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
