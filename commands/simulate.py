"""`tokenpod simulate`: what a scheduler would do with a trace, without a model or a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from rich.console import Console

from tokenpod.commands.serve import setting_flag
from tokenpod.core.capacity import offload_slots
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.policies.by_name import ADMISSIONS, batching
from tokenpod.scheduler.sequences.work import Limits
from tokenpod.service.config.sources import ServerSettings, SettingsError, load_settings
from tokenpod.simulator.machines import MACHINES, Machine
from tokenpod.simulator.simulator import Outcome, Simulator
from tokenpod.simulator.skipping import SkippingScheduler
from tokenpod.simulator.trace import Arrival, Trace, TraceError, at_rate, read_trace
from tokenpod_client.cli.bench.figures import Record
from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.bench.fleet import Measured
from tokenpod_client.cli.bench.messages import Level, Load, Plan
from tokenpod_client.cli.bench.messages import Outcome as Sent
from tokenpod_client.cli.bench.prompts import Prompts, parse_lengths
from tokenpod_client.cli.bench.report import LevelReport, section
from tokenpod_client.cli.bench.screen import print_level
from tokenpod_client.cli.bench.setup import parse_bounds
from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.options import Command, argument, option, parameters

SIMULATE_HELP = (
    "Show what a scheduler would do with a trace: the server's own, under a virtual clock. Prints"
    " the table that bench prints. Step times are a model fitted to measured ones; their prompts"
    " are made up, so only columns of the trace say what begins alike. Flags that serve has mean"
    " the same."
)

#: Settings that decide who runs next.
_SETTINGS = (
    "admission",
    "batching",
    "queue_order",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "max_batch_size",
    "max_batch_prefill_tokens",
    "max_gap_ms",
    "max_batch_total_tokens",
    "max_total_tokens",
    "max_input_tokens",
    "prefix_caching",
    "host_kv_bytes",
    "host_kv_least_tokens",
    "preemption",
)
_COLUMNS = 120
_ARRIVAL = np.dtype([("time", np.float64), ("tokens", np.uint32), ("sample", np.uint32)])


@dataclass(frozen=True)
class SimulateOptions:
    """The flags that `serve` does not have."""

    trace: Path = argument(
        "CSV with a line of names: arrival_s,prompt_tokens,output_tokens[,max_new_tokens,priority,"
        "prefix_id,prefix_tokens], or as Azure's and BurstGPT's published traces.",
        "TRACE",
        exists=True,
        dir_okay=False,
    )
    gpu: Literal["h200", "cpu"] = option(
        f"The machine: {'; '.join(f'{name}: {of.name}' for name, of in MACHINES.items())}.",
        default="h200",
    )
    max_new_tokens: int = option(
        "What requests ask for that don't say; outputs of a trace beyond it are cut.",
        min=1,
        default=1024,
    )
    speed: float = option("Let requests arrive so many times as fast.", min=0.001, default=1.0)
    slo: str | None = option(
        "Count requests within these latencies as good, such as ttft=500ms,itl=50ms.",
        "NAME=TIME,...",
    )


def _run(own: SimulateOptions, flags: dict[str, object]) -> int:
    machine = MACHINES[own.gpu]
    if flags.get("max_batch_prefill_tokens") is None:
        total = int(str(flags.get("max_batch_total_tokens") or machine.slots))
        flags["max_batch_prefill_tokens"] = min(machine.prefill_tokens, total)
    if flags.get("max_gap_ms") is None:
        flags["max_gap_ms"] = machine.gap_ms
    try:
        settings = load_settings(**flags, device="cpu")
        trace = read_trace(own.trace)
        bounds = _bounds(own.slo) if own.slo else {}
    except (SettingsError, TraceError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    outcome = _simulated(settings, machine, at_rate(trace.arrivals, own.speed), own.max_new_tokens)
    report = _report(outcome, bounds)
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _COLUMNS
    print_level(screen, replace(report, warnings=[*_notes(trace, outcome)]))
    for name, value in _own_figures(machine, outcome):
        screen.print(f"{name}: {value}", markup=False)
    return 0 if report.requests.succeeded else 1


def _bounds(text: str) -> dict[str, float]:
    try:
        return parse_bounds(text)
    except ValueError as error:
        raise SettingsError(f"--slo {error}") from None


def limits_of(settings: ServerSettings, machine: Machine) -> Limits:
    """The engine's limits: the operator's, or those that the machine has by default."""
    return Limits(
        slots=settings.max_batch_total_tokens or machine.slots,
        max_rows=settings.max_batch_size or machine.max_rows,
        max_positions=min(settings.max_total_tokens or machine.positions, machine.positions),
        prefill_tokens=settings.resolved_prefill_tokens,
        shortest_first=settings.queue_order == "shortest",
        max_gap=None if settings.max_gap_seconds is None else int(1e9 * settings.max_gap_seconds),
        prefix_caching=settings.prefix_caching,
        offload_slots=offload_slots(settings.host_kv_bytes, 1, machine.slot_bytes),
        offload_least=settings.host_kv_least_tokens,
    )


def _simulated(
    settings: ServerSettings, machine: Machine, arrivals: list[Arrival], most_new: int
) -> Outcome:
    limits = limits_of(settings, machine)
    scheduler = SkippingScheduler(
        limits,
        admission=ADMISSIONS[settings.admission],
        batching=batching(
            settings.batching,
            ratio=settings.resolved_waiting_served_ratio,
            max_waiting_tokens=settings.resolved_max_waiting_tokens,
        ),
        preemption=PREEMPTIONS[settings.preemption](settings.host_kv_least_tokens),
    )
    whole = settings.most_whole_prompt or limits.max_positions
    return Simulator(
        scheduler,
        machine.step_times,
        arrivals,
        max_new_tokens=most_new,
        max_input_tokens=min(settings.max_input_tokens or whole, whole),
        overlap=machine.overlap,
        copy_seconds=machine.slot_bytes / machine.copy_rate,
    ).run()


def _report(outcome: Outcome, bounds: dict[str, float]) -> LevelReport:
    last = outcome.arrivals[-1].at
    rate = len(outcome.arrivals) / last if last else None
    level = Level(1, Load("open", request_rate=rate), len(outcome.arrivals))
    one = parse_lengths("1")
    plan = Plan([Remote()], BenchOptions(), Prompts(one, one), 0, False, [level], bounds)
    return section(LevelReport, Measured(plan, level, [Sent([*_records(outcome)], 0.0, 0.0, [])]))


def _records(outcome: Outcome) -> Iterator[Record]:
    for index, (arrival, came) in enumerate(zip(outcome.arrivals, outcome.tokens, strict=True)):
        record = Record(index=index, target=0, due=arrival.at, sent=arrival.at, ended=arrival.at)
        record.prompt_tokens = arrival.prompt_tokens
        if index in outcome.refused:
            record.code, record.detail = "INVALID_ARGUMENT", "the request can never fit"
            yield record
            continue
        stream = np.ones(len(came), _ARRIVAL)
        stream["time"], stream["sample"] = came / 1e9, 0
        record.stream = bytearray(stream.tobytes())
        record.ended = float(stream["time"][-1])
        record.cached_tokens = int(outcome.cached[index])
        record.queue_s = float(outcome.began[index]) / 1e9 - arrival.at
        record.first_token_s = float(stream["time"][0]) - arrival.at
        yield record


def _notes(trace: Trace, outcome: Outcome) -> Iterator[str]:
    if trace.left_out:
        yield f"{trace.left_out} rows of the trace have no output and were left out"
    if outcome.refused:
        yield f"{len(outcome.refused)} requests could never fit and were refused"


def _own_figures(machine: Machine, outcome: Outcome) -> Iterator[tuple[str, str]]:
    yield "machine", machine.name
    yield "preemptions", f"{outcome.load.preemptions:,}"
    yield "tokens computed again", f"{outcome.wasted_tokens:,}"
    if outcome.load.offload_slots:
        yield "tokens swapped", f"{outcome.load.swapped_tokens:,}"
        yield "tokens fetched from the host's memory", f"{outcome.load.fetched_tokens:,}"
    yield "KV cache in use", f"{outcome.mean_use:.1%} on average, {outcome.most_use:.1%} at most"
    yield "steps", f"{outcome.steps:,}"


def _parameters() -> list[click.Parameter]:
    return [*_OWN, *(setting_flag(name, ServerSettings.model_fields[name]) for name in _SETTINGS)]


def _call(**given: Any) -> int:
    own = SimulateOptions(**{str(each.name): given.pop(str(each.name)) for each in _OWN})
    return _run(own, {name: value for name, value in given.items() if value is not None})


_OWN = parameters(SimulateOptions)
simulate = Command("simulate", callback=_call, params=_parameters(), help=SIMULATE_HELP)
