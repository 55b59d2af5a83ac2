"""From options to a plan: which prompts, which loads, how many requests.

What the command line says wins over a workload file, and the file over the defaults.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import click

from tokenpod_client.cli.bench.figures import LATENCIES
from tokenpod_client.cli.bench.files import Case, read_cases, read_texts
from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.bench.messages import Level, Load, Plan
from tokenpod_client.cli.bench.prompts import Prompts, parse_lengths
from tokenpod_client.cli.connection import Remote

Value = TypeVar("Value")

_REQUESTS = 64
_INPUT_TOKENS, _OUTPUT_TOKENS, _CONCURRENCY = "128", "64", 8
#: Token ids that are ordinary text in practically every vocabulary.
_TOKEN_RANGE = (10, 1000)


def make_plan(remotes: Sequence[Remote], options: BenchOptions) -> Plan:
    """Decide what to do. Raises click.BadParameter, which names the option, for what can't be."""
    case = _case(options)
    prompts = _prompts(options, case)
    loads = _loads(options, case)
    if options.burstiness != 1 and not any(load.burstiness and load.request_rate for load in loads):
        raise _bad("--burstiness", "needs --request-rate")
    warmup = [Level(0, Load("closed", options.warmup), options.warmup)] if options.warmup else []
    seeds = [options.seed, case.seed, secrets.randbits(32)]
    return Plan(
        remotes=list(remotes),
        options=options,
        prompts=prompts,
        seed=next(seed for seed in seeds if seed is not None),
        ignore_eos=not prompts.texts if options.ignore_eos is None else options.ignore_eos,
        levels=warmup
        + [
            Level(number, load, _requests(options, prompts, load), options.duration)
            for number, load in enumerate(loads, 1)
        ],
        bounds=_parsed("--slo", options.slo, parse_bounds) if options.slo is not None else {},
    )


def _loads(options: BenchOptions, case: Case) -> list[Load]:
    burstiness = options.burstiness
    if not 0 < burstiness < math.inf:
        raise _bad("--burstiness", f"is {burstiness}: must be above 0")
    at_once = _numbers("--concurrency", options.concurrency)
    if any(not number.is_integer() or number < 1 for number in at_once):
        raise _bad("--concurrency", f"is {options.concurrency!r}: write whole numbers from 1")
    clients = [int(number) for number in at_once]
    rates = _numbers("--request-rate", options.request_rate, infinite=True)
    if rates and len(clients) > 1:
        raise _bad("--concurrency", "can't be a list with --request-rate")
    most = clients[0] if clients else None
    if rates:
        return [Load("open", most, None if r == math.inf else r, burstiness) for r in rates]
    if clients or not case.pairs:
        return [Load("closed", number) for number in clients or [_CONCURRENCY]]
    if case.rate is None and case.concurrency:
        return [Load("closed", case.concurrency)]
    if case.rate is not None and case.at:
        return [Load("replay", None, case.rate)]
    return [Load("open", None, case.rate, burstiness)]


def _numbers(option: str, text: str | None, *, infinite: bool = False) -> list[float]:
    if text is None:
        return []
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    fine = all(number > 0 and (infinite or number < math.inf) for number in numbers)
    if not numbers or not fine:
        raise _bad(option, f"is {text!r}: write numbers above 0 with commas between")
    return numbers


def _case(options: BenchOptions) -> Case:
    """The case that is asked for, or an empty one."""
    file = options.workload
    if file is None:
        if options.case is not None:
            raise _bad("--case", "needs --workload")
        return Case()
    cases = _parsed("--workload", file, read_cases)
    if options.case is None and len(cases) == 1:
        return next(iter(cases.values()))
    if options.case not in cases:
        problem = f"is {options.case!r}" if options.case else "is needed"
        raise _bad("--case", f"{problem}: {file} has {', '.join(cases)}")
    return cases[options.case]


def _prompts(options: BenchOptions, case: Case) -> Prompts:
    _check_sources(options)
    prompt = _parsed("--input-tokens", options.input_tokens or _INPUT_TOKENS, parse_lengths)
    output = _parsed("--output-tokens", options.output_tokens or _OUTPUT_TOKENS, parse_lengths)
    if options.prompts is not None:
        read = partial(read_texts, json_lines=options.prompts.suffix == ".jsonl")
        return Prompts(prompt, output, texts=_parsed("--prompts", options.prompts, read))
    ids, prefix = _token_range(options, case), (options.prefix_tokens, options.prefix_groups)
    return Prompts(prompt, output, ids, *prefix, pairs=case.pairs, at=case.at)


def _check_sources(options: BenchOptions) -> None:
    """Refuse what would have no effect beside where the prompts come from."""
    beside = {
        "prompts": ("workload", "input_tokens", "token_range", "prefix_tokens"),
        "workload": ("input_tokens", "output_tokens"),
    }
    for source, others in beside.items():
        for other in others:
            if getattr(options, source) and getattr(options, other):
                raise _bad(f"--{source}", f"can't go with --{other.replace('_', '-')}")
    if options.prefix_groups > 1 and not options.prefix_tokens:
        raise _bad("--prefix-groups", "needs --prefix-tokens")


def _token_range(options: BenchOptions, case: Case) -> tuple[int, int]:
    if options.token_range is None:
        return case.token_range or _TOKEN_RANGE
    low, _, high = options.token_range.partition(":")
    if low.isdecimal() and high.isdecimal() and int(low) < int(high) <= 2**32:
        return int(low), int(high)
    raise _bad("--token-range", f"is {options.token_range!r}: write LOW:HIGH, LOW below HIGH")


def _requests(options: BenchOptions, prompts: Prompts, load: Load) -> int | None:
    """How many requests a level sends; None: until its time is over."""
    # Requests that all come at the start would never end by the time alone.
    if options.requests is not None or (options.duration is not None and not load.all_at_once):
        return options.requests
    return len(prompts.texts or prompts.pairs) or _REQUESTS


def _parsed(option: str, given: str | Path, parse: Callable[[str], Value]) -> Value:
    """What the text of an option, or the file that it names, means."""
    text, where = str(given), ""
    try:
        if isinstance(given, Path):
            text, where = given.read_text("utf-8"), f"{given}: "
    except (OSError, UnicodeError) as error:
        raise _bad(option, f"{given} can't be read: {error}") from error
    try:
        return parse(text)
    except ValueError as error:
        raise _bad(option, f"{where}{error}") from error


def _bad(option: str, problem: str) -> click.BadParameter:
    return click.BadParameter(problem, param_hint=option)


def parse_bounds(text: str) -> dict[str, float]:
    """`ttft=200ms,itl=50ms` as seconds by name. Raises ValueError that quotes the wrong part."""
    bounds: dict[str, float] = {}
    for part in map(str.strip, text.split(",")):
        name, _, bound = part.partition("=")
        if name not in LATENCIES:
            raise ValueError(f"has {part!r}: write NAME=TIME, of {', '.join(LATENCIES)}")
        found = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(ms|s)", bound)
        bounds[name] = float(found[1]) * (1e-3 if found[2] == "ms" else 1.0) if found else 0.0
        if not 0 < bounds[name] < math.inf:
            raise ValueError(f"has {part!r}: the time must be above 0, as 200ms or 1.5s")
    return bounds
