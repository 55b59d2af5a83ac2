"""What a terminal shows: a progress bar while a load runs, tables when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from tokenpod_client.cli.bench.figures import LATENCIES, Spread
from tokenpod_client.cli.bench.report import LevelReport

_SPREAD = ("mean", "p50", "p90", "p95", "p99", "max")


@contextmanager
def progress(
    console: Console, name: str, total: int | None
) -> Iterator[Callable[[int, int], None]]:
    """A bar on `console` if that is a terminal; yields what takes (ended, failed)."""
    failures = "[red]{task.fields[failed]}"
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), failures)
    hidden = not console.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden
    ) as bar:
        task = bar.add_task(name, total=total, failed="")

        def show(ended: int, failed: int) -> None:
            bar.update(task, completed=ended, failed=f"{failed} failed" if failed else "")

        yield show


def print_level(console: Console, report: LevelReport) -> None:
    """One level: its figures, its latencies, and what is wrong with them."""
    console.print()
    console.rule(f"[bold]{report.load.name}", align="left")
    console.print(_table(None, [""], _figures(report)))
    console.print(_table("latency, ms", _SPREAD, _latencies(report)))
    if len(report.targets) > 1:
        columns = ("sent", "succeeded", "output tokens", "ttft p50", "ttft p99")
        console.print(_table("server", columns, _targets(report)))
    if report.requests.first_error:
        console.print(f"first error: {report.requests.first_error}", style="red", markup=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def print_sweep(console: Console, reports: list[LevelReport]) -> None:
    """All levels, one row each."""
    rows = [_sweep_row(report) for report in reports]
    # A column without any figure has no place.
    shown = [column for column in rows[0] if any(row[column] != "-" for row in rows)]
    named = zip(reports, rows, strict=True)
    cells = [(report.load.name, *(row[column] for column in shown)) for report, row in named]
    table = _table("load", shown, cells)
    table.padding = (0, 1, 0, 0)
    console.print()
    console.rule("[bold]all loads; latencies in ms", align="left")
    console.print(table)


def _sweep_row(report: LevelReport) -> dict[str, str]:
    """Figures by the two lines above their column, which leave room on 80 columns."""
    found, rates = report.latency_s, report.throughput
    return {
        "offered\n/s": _figure(report.requests.offered_per_s),
        "done\n/s": _figure(rates.requests_per_s),
        "output\ntok/s": _figure(rates.output_tokens_per_s),
        "ttft\np50": _figure(found.ttft.p50, 1e3),
        "ttft\np99": _figure(found.ttft.p99, 1e3),
        "itl\np50": _figure(found.itl.p50, 1e3),
        "itl\np99": _figure(found.itl.p99, 1e3),
        "e2e\np99": _figure(found.e2e.p99, 1e3),
        "\ngood": f"{report.goodput.share:.0%}" if report.goodput else "-",
        "\nfailed": str(report.requests.failed),
    }


def _figures(report: LevelReport) -> Iterator[tuple[str, str]]:
    requests, tokens, rates = report.requests, report.tokens, report.throughput
    errors = ", ".join(f"{count} {code}" for code, count in requests.errors.items())
    cached = f"{tokens.cached / tokens.prompt:.1%}" if tokens.prompt else "-"
    yield "duration", f"{report.duration_s:.2f} s"
    yield "requests", f"{requests.succeeded:,} of {requests.sent:,} succeeded"
    yield "errors", errors or "none"
    yield "prompt tokens", f"{tokens.prompt:,} ({cached} cached)"
    yield "output tokens", f"{tokens.output:,} ({_figure(tokens.per_message)} per message)"
    yield "requests/s", _figure(rates.requests_per_s)
    yield "output tokens/s", _figure(rates.output_tokens_per_s)
    yield "total tokens/s", _figure(rates.total_tokens_per_s)
    if report.goodput:
        bounds = ", ".join(f"{k} {v * 1e3:g} ms" for k, v in report.goodput.bounds_s.items())
        good = f"{_figure(report.goodput.requests_per_s)} requests/s, {report.goodput.share:.1%}"
        yield f"goodput ({bounds})", good
    yield "client processes busy", ", ".join(f"{b:.0%}" for b in report.clients.busy) or "-"


def _latencies(report: LevelReport) -> Iterator[tuple[str, ...]]:
    rows = {f"{title} ({n})": getattr(report.latency_s, n) for n, title in LATENCIES.items()}
    rows["queue, by the server"] = report.server_s.queue
    rows["ttft, by the server"] = report.server_s.ttft
    for title, spread in rows.items():
        yield title, *_ms(spread, _SPREAD)


def _targets(report: LevelReport) -> Iterator[tuple[str, ...]]:
    for each in report.targets:
        counts = (each.sent, each.succeeded, each.output_tokens)
        yield each.address, *(f"{n:,}" for n in counts), *_ms(each.ttft_s, ("p50", "p99"))


def _table(first: str | None, others: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    """Rows below these columns; without a name for the first one there is no header."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=first is not None)
    table.add_column(first or "")
    for column in others:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _ms(spread: Spread, columns: Sequence[str]) -> list[str]:
    values = [getattr(spread, column) for column in columns]
    return ["-" if value is None else f"{value * 1e3:,.1f}" for value in values]


def _figure(value: float | None, scale: float = 1.0) -> str:
    """Three digits or all whole ones: 0.512, 5.12, 51.2, 512, 5,120."""
    if value is None:
        return "-"
    value *= scale
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"
