"""`tokenpod bench`: its options. `setup` decides what they mean together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenpod_client.cli.connection import PANEL
from tokenpod_client.cli.options import option

_load, _prompts = partial(option, panel="Load"), partial(option, panel="Prompts")
_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
_sampling, _report = partial(option, panel="Sampling"), partial(option, panel="Report")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The command's options as typed; the report repeats them by these names."""

    connections: int = option(
        "Connections of each process to each server.", panel=PANEL, min=1, default=1
    )
    concurrency: str | None = _load(
        "Closed loop: so many requests at a time. With --request-rate: at most so many in"
        " flight. Default: 8, or what the workload says.",
        "N[,N...]",
    )
    request_rate: str | None = _load(
        "Open loop: so many requests per second on average, however slow the server is; inf:"
        " all at once. Several are run one after the other.",
        "R[,R...]",
    )
    burstiness: float = _load(
        "With --request-rate: shape of the gamma distribution of the gaps. 1 is a Poisson"
        " process, less comes in bursts, more comes evenly.",
        default=1.0,
    )
    requests: int | None = _load(
        "Requests to send. Default: 64, or as many as the file has; any number with --duration.",
        min=1,
    )
    duration: float | None = _load(
        "Stop sending after so long and wait for what is in flight.", "SECONDS", min=0.001
    )
    warmup: int = _load("Requests to send first, all at once and not counted.", min=0, default=4)
    deadline: float | None = _load("Give up on a request after so long.", "SECONDS", min=0.001)
    processes: int = _load(
        "Client processes. One reads some 30,000 messages per second; the report says how busy"
        " they were.",
        min=1,
        max=256,
        default=1,
    )
    input_tokens: str | None = _prompts(
        "Tokens of a prompt. Default: 128.", "N|uniform:LOW:HIGH|lognormal:MEDIAN:SIGMA:MAX"
    )
    output_tokens: str | None = _prompts(
        "Tokens to generate; written as --input-tokens is. Default: 64.", "N|..."
    )
    token_range: str | None = _prompts(
        "Prompts are token ids drawn from LOW up to but without HIGH. Default: 10:1000, or what"
        " the workload says.",
        "LOW:HIGH",
    )
    prefix_tokens: int = _prompts(
        "Tokens before each prompt that a group shares.", min=0, default=0
    )
    prefix_groups: int = _prompts("How many different shared prefixes.", min=1, default=1)
    workload: Path | None = _prompts("Lengths and load from a case of a JSON file.", **_FILE)
    case: str | None = _prompts("Which case of --workload; not needed if there is one.")
    prompts: Path | None = _prompts(
        "Prompts from a file: one per line, or, if it ends in .jsonl, one object per line with"
        " prompt or messages.",
        **_FILE,
    )
    seed: int | None = _prompts(
        "Of prompts, lengths and arrivals. Default: the workload's, or drawn and reported.", min=0
    )
    ignore_eos: bool | None = _sampling(
        "Go on after an end-of-text token. Default: unless --prompts is given."
    )
    temperature: float | None = _sampling("Sample at this temperature.")
    top_p: float = _sampling(
        "Sample from the nucleus of this mass.", show_default=False, default=0.0
    )
    n: int = _sampling("Samples per request.", min=1, default=1)
    slo: str | None = _report(
        "Bounds for goodput, such as ttft=200ms,itl=50ms; of ttft, itl, tpot and e2e.",
        "NAME=TIME[,...]",
    )
    json_file: Path | None = _report("Write the report; - is standard output.", flag="--json")
    records: Path | None = _report("Write one JSON line per request.", dir_okay=False)
    plot: Path | None = _report(
        "Write pictures (PNG); needs the extra bench.", "DIR", file_okay=False
    )
