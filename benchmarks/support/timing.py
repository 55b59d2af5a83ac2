"""Timing: captured graphs and events on a GPU, ways by turns, medians and their spread."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Of kernels' inputs: where kernels are interpreted, bfloat16 has no arithmetic.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
#: Together larger than the L2 cache of any GPU: weights that are read in rotation come from memory.
ROTATED_BYTES = 200 << 20

Job = TypeVar("Job")


def synchronise() -> None:
    """Wait for the device, where there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a replayed CUDA graph, warm; on a CPU `run` itself, called once."""
    run()
    synchronise()
    if DEVICE.type != "cuda":
        return run
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    # Not `torch.cuda.graph`, which collects garbage first: a search captures hundreds.
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    synchronise()
    graph.replay()
    return graph.replay


def events_seconds(call: Callable[[], object], calls: int = 1) -> float:
    """Seconds of one of `calls` calls, by events around all of them."""
    if DEVICE.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def graph_seconds(
    runs: Callable[[], object] | Sequence[Callable[[], object]],
    *,
    rounds: int = 5,
    least: float = 0.01,
) -> float:
    """Seconds of one run: the median of rounds of replays of all runs, captured one after another.

    Args:
        runs: one, or several that take turns (with weights that exceed the L2 cache together).
        least: seconds that a round takes at least.
    """
    every = [runs] if callable(runs) else list(runs)

    def all_of_them() -> None:
        for run in every:
            run()

    replay = captured(all_of_them)
    if DEVICE.type != "cuda":  # kernels are interpreted: only their results mean anything
        return events_seconds(replay) / len(every)
    calls = max(1, min(200, int(least / max(events_seconds(replay), 1e-7))))
    return statistics.median(events_seconds(replay, calls) for _ in range(rounds)) / len(every)


def by_turns(
    ways: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1
) -> dict[str, list[float]]:
    """What each way returns, round by round; another way begins each round.

    Args:
        ways: by name; each returns its seconds, or its rate.
        warm: rounds before those that count.
    """
    names, found = list(ways), {name: [] for name in ways}
    for turn in range(warm + rounds):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            value = ways[name]()
            if turn >= warm:
                found[name].append(value)
    return found


def pair_ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """first / second, pair by pair."""
    return [a / b for a, b in zip(first, second, strict=True)]


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """A case that fails prints why (TRACE=1: where), and the others go on."""
    try:
        yield
    except Exception as error:
        name, first = type(error).__name__, (str(error).splitlines() or [""])[0]
        if name == "OutOfResources":  # of a tile that is tried
            print(f"too large: {what}: {first[:100]}", flush=True)
            return
        print(f"FAILED {what}: {name}: {first[:200]}", flush=True)
        if os.environ.get("TRACE"):
            traceback.print_exc()


def compile_ahead(
    jobs: Sequence[Job], compile_one: Callable[[Job], str | None], most: int = 14
) -> set[Job]:
    """Compile kernels in several processes, into Triton's cache on disk; the jobs that failed.

    Args:
        compile_one: runs a kernel once on little data; returns what went wrong, None if nothing.
    """
    if not jobs or DEVICE.type != "cuda":
        return set()
    began, broken = time.perf_counter(), set()
    workers = max(1, min(most, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, problem in zip(jobs, pool.map(compile_one, jobs), strict=True):
            if problem:
                broken.add(job)
                print(f"left out: {problem}", flush=True)
    print(f"{len(jobs)} compilations in {time.perf_counter() - began:.0f} s", flush=True)
    return broken


def profiled(run: Callable[[], object]) -> tuple[float, list[tuple[str, float]]]:
    """Share of the time in which some kernel ran, and (kernel, microseconds), longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    covered, end, by_name = 0.0, spans[0][0], dict[str, float]()
    for first, last in spans:
        covered += max(last - max(first, end), 0)
        end = max(end, last)
    for event in events:
        name = event.name.split("(")[0][-60:]
        by_name[name] = by_name.get(name, 0.0) + event.time_range.elapsed_us()
    return covered / (end - spans[0][0]), sorted(by_name.items(), key=lambda item: -item[1])


def error_of(got: torch.Tensor, truth: torch.Tensor) -> float:
    """‖got - truth‖ / ‖truth‖."""
    return float((got.double() - truth.double()).norm() / truth.double().norm())


def percentiles(values: Any, *shares: float) -> list[float]:
    """Of all values, by linear interpolation."""
    import numpy as np

    return [float(each) for each in np.quantile(np.asarray(values), shares)]


def neighbours(tile: Any) -> list[Any]:
    """The tile, and those that differ in one field: doubled, halved, one more, one less, turned.

    Repeat a search with the table that it has written until nothing changes. Tiles that a kernel
    can't have raise where they are compiled, and are left out.
    """
    found = [tile]
    for field in fields(tile):
        value = getattr(tile, field.name)
        if isinstance(value, bool):
            others = [not value]
        elif not isinstance(value, int):
            continue
        elif field.name in ("stages", "parts"):
            others = [value - 1, value + 1]
        else:
            others = [2 * value, value // 2] if value else [1, 512, 2048]
        found += [replace(tile, **{field.name: other}) for other in others if other >= 0]
    return list(dict.fromkeys(found))
