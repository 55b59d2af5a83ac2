"""What a terminal shows: a progress bar while it runs, tables when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tokenpod.cli.bench.figures import LATENCIES, Spread
from tokenpod.cli.bench.report import LevelReport

_TITLES = {
    "ttft": "time to first token",
    "itl": "between messages",
    "tpot": "time per output token",
    "e2e": "end to end",
}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


@contextmanager
def progress(
    console: Console, name: str, total: int | None
) -> Iterator[Callable[[int, int], None]]:
    """A bar on `console` if that is a terminal; yields what takes (ended, failed)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}", style="red"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=total, failed="")

        def show(ended: int, failed: int) -> None:
            bar.update(task, completed=ended, failed=f"{failed} failed" if failed else "")

        yield show


def print_level(console: Console, name: str, report: LevelReport) -> None:
    """One level: its figures, its latencies, and what is wrong with them."""
    console.print()
    console.rule(f"[bold]{name}", align="left")
    console.print(_figures(report))
    console.print(_latencies(report))
    if len(report.targets) > 1:
        console.print(_targets(report))
    if report.requests.first_error:
        console.print(f"first error: {report.requests.first_error}", style="red", markup=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def print_sweep(console: Console, levels: list[tuple[str, LevelReport]]) -> None:
    """All levels, a row each."""
    rows = [_sweep_row(report) for _, report in levels]
    # A column without any figure has no place.
    shown = [column for column in rows[0] if any(row[column] != "-" for row in rows)]
    table = _table("load", *shown)
    table.padding = (0, 1, 0, 0)
    for (name, _), row in zip(levels, rows, strict=True):
        table.add_row(name, *(row[column] for column in shown))
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
        "ttft\np50": _figure_ms(found.ttft.p50),
        "ttft\np99": _figure_ms(found.ttft.p99),
        "itl\np50": _figure_ms(found.itl.p50),
        "itl\np99": _figure_ms(found.itl.p99),
        "e2e\np99": _figure_ms(found.e2e.p99),
        "\ngood": f"{report.goodput.share:.0%}" if report.goodput else "-",
        "\nfailed": str(report.requests.failed),
    }


def _figures(report: LevelReport) -> Table:
    requests, tokens, rates = report.requests, report.tokens, report.throughput
    errors = ", ".join(f"{count} {code}" for code, count in requests.errors.items())
    cached = f"{tokens.cached / tokens.prompt:.1%}" if tokens.prompt else "-"
    rows = [
        ("duration", f"{report.duration_s:.2f} s"),
        ("requests", f"{requests.succeeded:,} of {requests.sent:,} succeeded"),
        ("errors", errors or "none"),
        ("prompt tokens", f"{tokens.prompt:,} ({cached} cached)"),
        ("output tokens", f"{tokens.output:,} ({_figure(tokens.per_message)} per message)"),
        ("requests/s", _figure(rates.requests_per_s)),
        ("output tokens/s", _figure(rates.output_tokens_per_s)),
        ("total tokens/s", _figure(rates.total_tokens_per_s)),
    ]
    if report.goodput:
        bounds = ", ".join(f"{k} {v * 1e3:g} ms" for k, v in report.goodput.bounds_s.items())
        good = f"{_figure(report.goodput.requests_per_s)} requests/s, {report.goodput.share:.1%}"
        rows.append((f"goodput ({bounds})", good))
    busy = ", ".join(f"{share:.0%}" for share in report.clients.busy)
    rows.append(("client processes busy", busy or "-"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _latencies(report: LevelReport) -> Table:
    table = _table("latency, ms", *_COLUMNS)
    for name in LATENCIES:
        _add_spread(table, f"{_TITLES[name]} ({name})", getattr(report.latency_s, name))
    _add_spread(table, "queue, by the server", report.server_s.queue)
    _add_spread(table, "ttft, by the server", report.server_s.ttft)
    return table


def _targets(report: LevelReport) -> Table:
    table = _table("server", "sent", "succeeded", "output tokens", "ttft p50", "ttft p99")
    for target in report.targets:
        figures = (target.sent, target.succeeded, target.output_tokens)
        latencies = (_ms(target.ttft_s.p50), _ms(target.ttft_s.p99))
        table.add_row(target.address, *(f"{figure:,}" for figure in figures), *latencies)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _add_spread(table: Table, name: str, values: Spread) -> None:
    table.add_row(name, *(_ms(getattr(values, column)) for column in _COLUMNS))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _figure_ms(seconds: float | None) -> str:
    return _figure(None if seconds is None else seconds * 1e3)


def _figure(value: float | None) -> str:
    """Three digits or all whole ones: 0.512, 5.12, 51.2, 512, 5,120."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"
