"""What `tokenpod bench` does once its options are read: measure, show, write."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import typer
from rich.console import Console

import tokenpod
from tokenpod.cli.bench.arrivals import label
from tokenpod.cli.bench.figures import latency
from tokenpod.cli.bench.fleet import FleetError, Measured, fleet
from tokenpod.cli.bench.messages import Level
from tokenpod.cli.bench.report import SCHEMA_VERSION, LevelReport, Report, level_report
from tokenpod.cli.bench.screen import print_level, print_sweep, progress
from tokenpod.cli.bench.setup import BenchOptions, Setup, make_setup
from tokenpod.cli.commands import MODEL_ID_KEY, run
from tokenpod.cli.remote import Remote, RemoteError
from tokenpod.protos.generate.v3 import generate_pb2 as v3
from tokenpod.protos.generate.v3.generate_pb2_grpc import TextGenerationServiceStub

#: Seconds that a server gets to say which model it runs.
_INFO_SECONDS = 10.0
#: Columns of a table that goes to a file.
_FILE_COLUMNS = 120

_Row = tuple[str, Measured, LevelReport]


def bench(remotes: Sequence[Remote], options: BenchOptions) -> int:
    """Measure and report; the exit status: 0 if any request of every load succeeded, else 1.

    Raises typer.BadParameter for options that can't be, typer.Exit(1) after `error:` lines.
    """
    setup = make_setup(remotes, options)
    _check_outputs(options)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    to_stdout = options.json_file == Path("-")
    screen = _console(stderr=to_stdout)
    models, rows = run(_measure(remotes, setup, screen))
    if len(rows) > 1:
        print_sweep(screen, [(name, report) for name, _, report in rows])
    levels = [report for _, _, report in rows]
    used = {name: value for name, value in asdict(options).items() if value is not None}
    version, seed = tokenpod.__version__, setup.plan.seed
    report = Report(SCHEMA_VERSION, version, started, seed, models, used, levels)
    _write(options, report, rows)
    return 0 if all(level.requests.succeeded for level in levels) else 1


async def _measure(
    remotes: Sequence[Remote], setup: Setup, screen: Console
) -> tuple[dict[str, str | None], list[_Row]]:
    """The servers' models by address, and every level. Raises RemoteError."""
    models = {remote.address: await _model_id(remote) for remote in remotes}
    bar = Console(stderr=True)
    rows: list[_Row] = []
    addresses = [remote.address for remote in remotes]
    try:
        async with fleet(setup.plan) as workers:
            if setup.warmup:
                with progress(bar, "warm-up", setup.warmup.requests) as show:
                    _check_warmup(await workers.run(setup.warmup, show))
            for level in setup.levels:
                name = label(level.load)
                with progress(bar, name, _total(level)) as show:
                    measured = await workers.run(level, show)
                report = level_report(measured, addresses, setup.bounds, setup.prefix_tokens)
                rows.append((name, measured, report))
                print_level(screen, name, report)
    except FleetError as error:
        raise RemoteError(str(error)) from error
    return models, rows


async def _model_id(remote: Remote) -> str | None:
    async with remote.channel() as channel:
        stub = TextGenerationServiceStub(channel)
        call = stub.Info(v3.InfoRequest(), timeout=_INFO_SECONDS, metadata=remote.metadata)
        metadata = await call.initial_metadata()
        await call
    found = metadata.get(MODEL_ID_KEY) if metadata else None
    return str(found) if found is not None else None


def _check_warmup(measured: Measured) -> None:
    failed = [record for record in measured.records if not record.ok]
    if len(failed) == len(measured.records):
        what = " ".join(failed[0].detail.split())
        raise RemoteError(f"no request of the warm-up succeeded: {failed[0].code}: {what}")


def _total(level: Level) -> int | None:
    return level.requests if level.duration is None else None


def _check_outputs(options: BenchOptions) -> None:
    """Refuse before the run what would fail after it."""
    for option, path in (("--json", options.json_file), ("--records", options.records)):
        if path is None or path == Path("-"):
            continue
        if not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}", param_hint=option)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{path} can't be written", param_hint=option)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print(
            "error: --plot needs matplotlib, which is not installed: pip install 'tokenpod[bench]'",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    if options.plot is not None:
        try:
            options.plot.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{options.plot} can't be made: {error.strerror}"
            raise typer.BadParameter(problem, param_hint="--plot") from error


def _write(options: BenchOptions, report: Report, rows: list[_Row]) -> None:
    if options.json_file is not None:
        text = msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=2) + b"\n"
        if options.json_file == Path("-"):
            sys.stdout.write(text.decode())
        else:
            options.json_file.write_bytes(text)
    if options.records is not None:
        with options.records.open("w", encoding="utf-8") as out:
            for name, measured, _ in rows:
                for line in _record_lines(name, measured):
                    print(line, file=out)
    if options.plot is not None:
        from tokenpod.cli.bench.plots import plot

        for path in plot(options.plot, rows):
            print(f"wrote {path}", file=sys.stderr)


def _record_lines(name: str, measured: Measured) -> list[str]:
    """One JSON object a request; times in seconds from the level's start."""
    lines = []
    for record in measured.records:
        found = latency(record)
        fields = {
            "load": name,
            "index": record.index,
            "target": record.target,
            "code": record.code,
            "detail": record.detail,
            "due_s": record.due,
            "sent_s": record.sent,
            "ended_s": record.ended,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": found.output_tokens,
            "ttft_s": found.ttft,
            "tpot_s": float(np.mean(found.tpot)) if len(found.tpot) else None,
            "itl_s": found.itl.tolist(),
        }
        lines.append(json.dumps(fields, ensure_ascii=False))
    return lines


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return (
        console
        if console.is_terminal
        else Console(stderr=stderr, highlight=False, width=_FILE_COLUMNS)
    )
