"""What the host does for a step: plan, settle, a whole turn of the loop, bytes for others.

Nothing is computed: executors answer at once. The machine may be busy, so the least of many counts;
`turns` are of the engine's whole loop.
"""

from __future__ import annotations

import argparse
import gc
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from benchmarks.support.engine import Bench, Client
from benchmarks.support.report import Report
from tokenpod.core.link import encode_frame
from tokenpod.core.messages import FromEngine
from tokenpod.core.outputs import FinishCode, Load, StepOutputs
from tokenpod.core.plan import StepPlan
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.core.windows import WindowRoom
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.steps.executor import StepResult
from tokenpod.scheduler.policies.by_name import ADMISSIONS, BATCHINGS, batching
from tokenpod.scheduler.scheduler import Limits, Scheduler

STEPS = 300
PROMPT = 64


def scheduler_with(rows: int) -> Scheduler:
    """A scheduler whose rows all decode, with different prompts."""
    slots = rows * (PROMPT + 2 * STEPS)
    scheduler = Scheduler(Limits(slots, rows, 2048, prefill_tokens=rows * PROMPT))
    stopping = StoppingParams(2 * STEPS, eos_token_ids=frozenset({2}))
    for row in range(rows):
        prompt = [row] * PROMPT
        scheduler.submit(Request([row], prompt, SamplingParams(), stopping, deadline_at=1 << 62))
    while turn(scheduler):
        pass
    return scheduler


def turn(scheduler: Scheduler) -> int:
    """Plan and settle one step; its prompt tokens."""
    step = scheduler.plan(0)
    scheduler.settle(step, [1] * len(step.sampled), 0)
    return step.prompt_tokens


def ask(scheduler: Scheduler, first: int, requests: int, *, prompt: int, most: int) -> None:
    """Requests with different prompts."""
    for number in range(first, first + requests):
        stopping = StoppingParams(most, eos_token_ids=frozenset({2}))
        scheduler.submit(Request([number], [number] * prompt, SamplingParams(), stopping))


def full_pod(
    rows: int, waiting: int, admission: str, turns: str, *, memory: bool, offload_slots: int = 0
) -> tuple[float, float, float]:
    """Least milliseconds of plans of a full pod: nobody comes or goes; one has gone; its median.

    The waiting requests lack `memory`, or else a row.
    """
    longest, new = PROMPT + 500, 500
    slots = rows * (longest + 300)
    limits = Limits(
        slots,
        (2 if memory else 1) * rows,
        slots,
        prefill_tokens=rows * PROMPT,
        offload_slots=offload_slots,
    )
    made = batching(turns)
    scheduler = Scheduler(limits, admission=ADMISSIONS[admission], batching=made)
    ask(scheduler, 0, rows, prompt=PROMPT, most=new)
    while turn(scheduler):
        pass
    assert scheduler.load().running == rows
    ask(scheduler, rows, waiting, prompt=slots - rows * PROMPT if memory else PROMPT, most=new)
    turn(scheduler)
    calm: list[float] = []
    moved: list[float] = []
    for number in range(60):
        for times in (calm, moved):
            if times is moved:
                scheduler.abort([number])
            began = time.perf_counter()
            step = scheduler.plan(0)
            times.append(time.perf_counter() - began)
            scheduler.settle(step, [1] * len(step.sampled), 0)
    assert scheduler.load().waiting
    return 1e3 * min(calm), 1e3 * min(moved), 1e3 * sorted(moved)[len(moved) // 2]


SMOKE = {
    "cpu": "--rows 64",
}
PARTS = ("steps", "turns", "encoding", "full")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 64, 256, 512])
    parser.add_argument("--window", type=int, help="turns with window slots, of such layers")


def run(asked: argparse.Namespace, report: Report) -> None:
    # As the engine does once it has started.
    gc.collect()
    gc.freeze()
    for part in asked.parts:
        globals()[f"measure_{part}"](asked.rows, report)
    if asked.window:
        measure_turns(asked.rows, report, asked.window)


def measure_steps(sizes: list[int], report: Report) -> None:
    """Planning and settling a step of decoding rows."""
    for rows in sizes:
        scheduler = scheduler_with(rows)
        plans, settles = [], []
        tokens = [1] * rows
        for _ in range(STEPS):
            began = time.perf_counter()
            step = scheduler.plan(0)
            planned = time.perf_counter()
            scheduler.settle(step, tokens, 0)
            plans.append(planned - began)
            settles.append(time.perf_counter() - planned)
        assert step.plan.rows == rows
        plan, settle = (1e6 * min(times) for times in (plans, settles))
        report.row("steps", rows=rows, plan_us=plan, settle_us=settle)


def measure_encoding(sizes: list[int], report: Report) -> None:
    """Encode and decode a plan for other ranks, and the outputs of a step for front ends."""
    encoder = msgspec.msgpack.Encoder()
    reader = msgspec.msgpack.Decoder(FromEngine)
    for rows in sizes:
        scheduler = scheduler_with(rows)
        plan = scheduler.plan(0).plan
        outputs = StepOutputs(
            step=1,
            at=1,
            sequence_ids=list(range(rows)),
            token_ids=[1] * rows,
            logprobs=[0.0] * rows,
            finishes=[int(FinishCode.RUNNING)] * rows,
            load=Load(rows, 0, 0, rows, rows, 0),
        )
        frame, data = encode_frame(encoder, outputs), plan.to_bytes()
        ways = {
            "plan_encode_us": plan.to_bytes,
            "plan_read_us": partial(StepPlan.from_bytes, data),
            "outputs_encode_us": partial(encode_frame, encoder, outputs),
            "outputs_read_us": partial(reader.decode, frame[4:]),
        }
        report.row("encoding", rows=rows, **{name: _least_us(way) for name, way in ways.items()})


def _least_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e6 * min(times)


class AnswersAtOnce:
    """An executor without a device: random tokens."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(1)

    def launch(self, plan: StepPlan) -> Any:
        """A flight that has landed."""
        count = int(plan.r_samples.sum())
        tokens = self._draw.integers(128_000, size=count).tolist()
        result = StepResult(tokens, [0.0] * count, [])
        return types.SimpleNamespace(wait=lambda: result)

    def release(self, rows: Any) -> None:
        """Nothing is kept."""


def measure_turns(sizes: list[int], report: Report, window: int | None = None) -> None:
    """Whole turns of the engine's loop: receive, plan, launch, settle, publish."""
    for rows in sizes:
        client, windows, prompt = Client(), None, max(rows * PROMPT, 64)
        if window is not None:
            windows = WindowRoom(window, 0).for_rows(rows + 1, 4096, prompt + PROMPT)
        limits = Limits(rows * 1000, rows, 4096, prefill_tokens=prompt, windows=windows)
        loop = EngineLoop(client, Scheduler(limits), AnswersAtOnce(), overlap=True)  # type: ignore[arg-type]
        bench = Bench(loop, client, 128_000)
        for _ in range(rows):
            bench.ask(PROMPT, STEPS + 20)
        while not client.arrivals or client.arrivals[-1][1] < rows:
            loop.turn()
        times = []
        for _ in range(STEPS):
            began = time.thread_time()
            loop.turn()
            times.append(1e6 * (time.thread_time() - began))
        name = "turns" if window is None else f"turns, window of {window}"
        report.row(name, rows=rows, least_us=min(times), median_us=sorted(times)[STEPS // 2])


def measure_full(sizes: list[int], report: Report) -> None:
    """Plans of a full pod, under every pair of policies; then with the host's memory."""
    rows = max(sizes)
    names = [(a, b, 0) for a in ADMISSIONS for b in BATCHINGS] + [("exact", "mixed", 1 << 20)]
    for admission_name, turns, host in names:
        for memory in (False, True):
            # Those that lack memory are as long as most of the pool.
            waiting = rows // 8 if memory else 2 * rows
            calm, moved, median = full_pod(
                rows, waiting, admission_name, turns, memory=memory, offload_slots=host
            )
            report.row(
                f"{rows} rows and {waiting} waiting",
                policies=f"{admission_name} + {turns}",
                the_waiting_lack="memory" if memory else "a row",
                offload_slots=host,
                nobody_comes_ms=calm,
                one_has_gone_ms=moved,
                median_ms=median,
            )
