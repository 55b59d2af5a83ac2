"""`tokenpod bench`: its options. What they mean together is `setup`'s to say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenpod.cli.connection import PANEL, Tls, TlsCa, TlsCert, TlsKey, Token, remote_of

_LOAD = "Load"
_PROMPTS = "Prompts"
_SAMPLING = "Sampling"
_REPORT = "Report"

_FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "panel": _PROMPTS, "metavar": "FILE"}


def _option(text: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel, **more)


def bench(
    address: Annotated[
        list[str] | None,
        _option(
            "A server; requests take turns. Repeatable. Default: 127.0.0.1:50051.",
            PANEL,
            "HOST:PORT|unix:PATH",
        ),
    ] = None,
    connections: Annotated[
        int, _option("Connections of each process to each server.", PANEL, "N", min=1)
    ] = 1,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    concurrency: Annotated[
        str | None,
        _option(
            "Closed loop: so many requests at a time. With --request-rate: at most so many in"
            " flight. Default: 8, or what the workload says.",
            _LOAD,
            "N[,N...]",
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        _option(
            "Open loop: so many requests a second on average, however slow the server is; inf:"
            " all at once. Several are run one after the other.",
            _LOAD,
            "R[,R...]",
        ),
    ] = None,
    burstiness: Annotated[
        float,
        _option(
            "With --request-rate: shape of the gamma distribution of the gaps. 1 is a Poisson"
            " process, less comes in bursts, more comes evenly.",
            _LOAD,
            "X",
        ),
    ] = 1.0,
    requests: Annotated[
        int | None,
        _option(
            "Requests to send. Default: 64, or as many as the file has; any number with"
            " --duration.",
            _LOAD,
            "N",
            min=1,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        _option(
            "Stop sending after so long and wait for what is in flight.",
            _LOAD,
            "SECONDS",
            min=0.001,
        ),
    ] = None,
    warmup: Annotated[
        int, _option("Requests to send first, all at once and not counted.", _LOAD, "N", min=0)
    ] = 4,
    deadline: Annotated[
        float | None,
        _option("Give up on a request after so long.", _LOAD, "SECONDS", min=0.001),
    ] = None,
    processes: Annotated[
        int,
        _option(
            "Client processes. One reads some 30,000 messages a second; the report says how busy"
            " they were.",
            _LOAD,
            "N",
            min=1,
            max=256,
        ),
    ] = 1,
    input_tokens: Annotated[
        str | None,
        _option(
            "Tokens of a prompt. Default: 128.",
            _PROMPTS,
            "N|uniform:LOW:HIGH|lognormal:MEDIAN:SIGMA:MAX",
        ),
    ] = None,
    output_tokens: Annotated[
        str | None,
        _option(
            "Tokens to generate; written as --input-tokens is. Default: 64.", _PROMPTS, "N|..."
        ),
    ] = None,
    token_range: Annotated[
        str | None,
        _option(
            "Prompts are token ids drawn from LOW up to but without HIGH. Default: 10:1000, or"
            " what the workload says.",
            _PROMPTS,
            "LOW:HIGH",
        ),
    ] = None,
    prefix_tokens: Annotated[
        int,
        _option("Tokens before each prompt that a group shares.", _PROMPTS, "N", min=0),
    ] = 0,
    prefix_groups: Annotated[
        int, _option("How many different shared prefixes.", _PROMPTS, "N", min=1)
    ] = 1,
    workload: Annotated[
        Path | None, _option("Lengths and load from a case of a JSON file.", **_FILE)
    ] = None,
    case: Annotated[
        str | None, _option("Which case of --workload; not needed if there is one.", _PROMPTS)
    ] = None,
    prompts: Annotated[
        Path | None,
        _option(
            "Prompts from a file: one per line, or, if it ends in .jsonl, one object per line with"
            " prompt or messages.",
            **_FILE,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        _option(
            "Of prompts, lengths and arrivals. Default: the workload's, or drawn and told.",
            _PROMPTS,
            "N",
            min=0,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        _option("Go on after an end-of-text token. Default: unless --prompts is given.", _SAMPLING),
    ] = None,
    temperature: Annotated[
        float | None, _option("Sample at this temperature.", _SAMPLING, "X", show_default=False)
    ] = None,
    top_p: Annotated[
        float,
        _option("Sample from the nucleus of this mass.", _SAMPLING, "X", show_default=False),
    ] = 0.0,
    n: Annotated[int, _option("Samples a request.", _SAMPLING, "N", min=1)] = 1,
    slo: Annotated[
        str | None,
        _option(
            "Bounds for goodput, such as ttft=200ms,itl=50ms; of ttft, itl, tpot and e2e.",
            _REPORT,
            "NAME=TIME[,...]",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the report; - is standard output.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    records: Annotated[
        Path | None,
        _option("Write one JSON line a request.", _REPORT, "FILE", dir_okay=False),
    ] = None,
    plot: Annotated[
        Path | None,
        _option("Write pictures (PNG); needs the extra bench.", _REPORT, "DIR", file_okay=False),
    ] = None,
) -> None:
    """Measure a running server under load: throughput, latencies, goodput."""
    given = dict(locals())
    for name in ("address", "token", "tls", "tls_ca", "tls_cert", "tls_key"):
        del given[name]
    way = (token, tls, tls_ca, tls_cert, tls_key)
    remotes = [remote_of(one, *way) for one in address or ["127.0.0.1:50051"]]

    # Here, not above: numpy and grpc would delay every other command's help.
    from tokenpod.cli.bench import command
    from tokenpod.cli.bench.setup import BenchOptions

    raise typer.Exit(command.bench(remotes, BenchOptions(**given)))
