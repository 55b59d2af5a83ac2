"""What `tokenpod bench` does once its options are read: measure, show, write."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
import numpy as np
from rich.console import Console

import tokenpod_client
from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.bench.fleet import Fleet, Measured
from tokenpod_client.cli.bench.messages import Plan
from tokenpod_client.cli.bench.report import (
    SCHEMA_VERSION,
    LevelReport,
    Report,
    first_error,
    section,
)
from tokenpod_client.cli.bench.screen import print_level, print_sweep, progress
from tokenpod_client.cli.bench.setup import make_plan
from tokenpod_client.cli.commands import ask_model, remote_errors, run
from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.remote import RemoteError

#: Seconds that a server gets to say which model it runs.
_INFO_SECONDS = 10.0
#: Columns of a table that goes to a file.
_FILE_COLUMNS = 120
_STDOUT = Path("-")

_Rows = list[tuple[Measured, LevelReport]]


def bench(remotes: Sequence[Remote], options: BenchOptions) -> int:
    """Measure and report; the exit status: 0 if any request of every load succeeded, else 1.

    Raises click.BadParameter for options that can't be, click's Exit after `error:` lines.
    """
    plan = make_plan(remotes, options)
    _check_outputs(options)
    started = datetime.now(UTC)
    screen = Console(stderr=options.json_file == _STDOUT, highlight=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    models = run(_model_ids(plan.remotes))
    with remote_errors():
        rows = _measure(plan, screen)
    levels = [report for _, report in rows]
    report = Report(
        schema_version=SCHEMA_VERSION,
        tokenpod_version=tokenpod_client.__version__,
        started_at=started.isoformat(timespec="seconds"),
        seed=plan.seed,
        model_ids=models,
        options={name: value for name, value in asdict(options).items() if value is not None},
        levels=levels,
    )
    if len(levels) > 1:
        print_sweep(screen, levels)
    _write(options, report, rows)
    return 0 if all(level.requests.succeeded for level in levels) else 1


def _measure(plan: Plan, screen: Console) -> _Rows:
    """Every level but the warm-up. Raises RemoteError."""
    bar = Console(stderr=True)
    rows: _Rows = []
    with Fleet(plan) as workers:
        for level in plan.levels:
            name = level.load.name if level.number else "warm-up"
            total = level.requests if level.duration is None else None
            with progress(bar, name, total) as show:
                measured = workers.run(level, show)
            if level.number == 0:
                if not measured.good:
                    what = first_error(measured)
                    raise RemoteError(f"no request of the warm-up succeeded: {what}")
                continue
            report = section(LevelReport, measured)
            rows.append((measured, report))
            print_level(screen, report)
    return rows


async def _model_ids(remotes: Sequence[Remote]) -> dict[str, str | None]:
    asked = [replace(each, deadline=_INFO_SECONDS) for each in remotes]
    return {each.address: (await ask_model(each)).name for each in asked}


def _check_outputs(options: BenchOptions) -> None:
    """Refuse before the run what would fail after it."""
    for option, path in (("--json", options.json_file), ("--records", options.records)):
        if path is None or path == _STDOUT:
            continue
        if not path.parent.is_dir():
            raise click.BadParameter(f"there is no folder {path.parent}", param_hint=option)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.BadParameter(f"{path} can't be written", param_hint=option)
    if options.plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        needed = "matplotlib, which is not installed: pip install 'tokenpod[bench]'"
        print(f"error: --plot needs {needed}", file=sys.stderr)
        raise click.exceptions.Exit(1)
    try:
        options.plot.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{options.plot} can't be made: {error.strerror}"
        raise click.BadParameter(problem, param_hint="--plot") from error


def _write(options: BenchOptions, report: Report, rows: _Rows) -> None:
    if options.json_file is not None:
        text = msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=2) + b"\n"
        if options.json_file == _STDOUT:
            sys.stdout.write(text.decode())
        else:
            options.json_file.write_bytes(text)
    if options.records is not None:
        with options.records.open("wb") as out:
            out.writelines(line for measured, _ in rows for line in _record_lines(measured))
    if options.plot is not None:
        from tokenpod_client.cli.bench.plots import plot

        for path in plot(options.plot, rows):
            print(f"wrote {path}", file=sys.stderr)


def _record_lines(measured: Measured) -> Iterator[bytes]:
    """One JSON object per request; times in seconds from the level's start."""
    same = ("index", "target", "code", "detail", "prompt_tokens", "cached_tokens", "output_tokens")
    for record in measured.requests:
        fields = {
            "load": measured.level.load.name,
            **{name: getattr(record, name) for name in same},
            # JSON has no NaN: msgspec writes null.
            **{f"{name}_s": getattr(record, name) for name in ("due", "sent", "ended", "ttft")},
            "tpot_s": float(np.mean(record.tpot)) if len(record.tpot) else None,
            "itl_s": record.itl.tolist(),
        }
        yield msgspec.json.encode(fields) + b"\n"
