"""From options to a plan: which prompts, which loads, how many requests.

What the command line says wins over a workload file, and the file over the defaults.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from tokenpod.cli.bench.arrivals import Closed, Load, Open, Replay
from tokenpod.cli.bench.figures import parse_bounds
from tokenpod.cli.bench.lengths import Lengths, parse_lengths
from tokenpod.cli.bench.messages import Level, Plan, Sampling, Target
from tokenpod.cli.bench.prompts import (
    Drawn,
    Listed,
    PromptFileError,
    Prompts,
    TextPrompts,
    TokenPrompts,
    read_texts,
)
from tokenpod.cli.bench.workload import Case, WorkloadError, read_cases
from tokenpod.cli.remote import Remote

_REQUESTS = 64
_INPUT_TOKENS, _OUTPUT_TOKENS = "128", "64"
_CONCURRENCY = 8
#: Token ids that are ordinary text in practically every vocabulary.
_TOKEN_RANGE = (10, 1000)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The command's options, by their names and as typed."""

    connections: int = 1
    concurrency: str | None = None
    request_rate: str | None = None
    burstiness: float = 1.0
    requests: int | None = None
    duration: float | None = None
    warmup: int = 4
    deadline: float | None = None
    processes: int = 1
    input_tokens: str | None = None
    output_tokens: str | None = None
    token_range: str | None = None
    prefix_tokens: int = 0
    prefix_groups: int = 1
    workload: Path | None = None
    case: str | None = None
    prompts: Path | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float = 0.0
    n: int = 1
    slo: str | None = None
    json_file: Path | None = None
    records: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """What the command does: one plan, and its levels in order.

    Args:
        warmup: the level before them, or None.
        bounds: for goodput, in seconds by latency; may be empty.
    """

    plan: Plan
    warmup: Level | None
    levels: list[Level]
    bounds: dict[str, float]

    @property
    def prefix_tokens(self) -> int | None:
        """Tokens of each prompt that others share; None where we can't know."""
        prompts = self.plan.prompts
        return prompts.prefix_tokens if isinstance(prompts, TokenPrompts) else None


def make_setup(remotes: Sequence[Remote], options: BenchOptions) -> Setup:
    """Decide what to do. Raises typer.BadParameter, which names the option, for what can't be."""
    case = _case(options)
    prompts = _prompts(options, case)
    levels = [
        Level(number, load, _requests(options, prompts, load), options.duration)
        for number, load in enumerate(make_loads(options, case), 1)
    ]
    ignore_eos = options.ignore_eos
    if ignore_eos is None:
        ignore_eos = options.prompts is None
    seed = options.seed
    if seed is None:
        seed = case.seed if case and case.seed is not None else secrets.randbits(32)
    plan = Plan(
        process=0,
        processes=options.processes,
        target=_target(remotes, options.connections),
        prompts=prompts,
        sampling=Sampling(ignore_eos, options.temperature, options.top_p, options.n),
        seed=seed,
        deadline=options.deadline,
    )
    warmup = Level(0, Closed(options.warmup), options.warmup, None) if options.warmup else None
    return Setup(plan, warmup, levels, _bounds(options.slo))


def make_loads(options: BenchOptions, case: Case | None) -> list[Load]:
    """The loads to run, in order. Raises typer.BadParameter."""
    loads = _loads(options, case)
    if options.burstiness != 1 and not any(isinstance(load, Open) and load.rate for load in loads):
        raise _bad("--burstiness", "needs --request-rate")
    return loads


def _loads(options: BenchOptions, case: Case | None) -> list[Load]:
    if not 0 < options.burstiness < math.inf:
        raise _bad("--burstiness", f"is {options.burstiness}: must be above 0")
    at_once = _numbers("--concurrency", options.concurrency)
    if any(not number.is_integer() or number < 1 for number in at_once):
        raise _bad("--concurrency", f"is {options.concurrency!r}: write whole numbers from 1")
    clients = [int(number) for number in at_once]
    rates = _numbers("--request-rate", options.request_rate, infinite=True)
    if rates and len(clients) > 1:
        raise _bad("--concurrency", "can't be a list with --request-rate")
    most = clients[0] if clients else None
    if rates:
        return [Open(None if r == math.inf else r, options.burstiness, most) for r in rates]
    if case and case.rate is not None and not clients:
        if case.at:
            return [Replay(case.rate)]
        return [Open(case.rate, options.burstiness)]
    if case and not clients:
        return [Closed(case.concurrency) if case.concurrency else Open(None)]
    return [Closed(number) for number in clients or [_CONCURRENCY]]


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


def _case(options: BenchOptions) -> Case | None:
    if options.workload is None:
        if options.case is not None:
            raise _bad("--case", "needs --workload")
        return None
    try:
        cases = read_cases(_read(options.workload, "--workload"))
    except WorkloadError as error:
        raise _bad("--workload", f"{options.workload}: {error}") from error
    if options.case is None and len(cases) == 1:
        return next(iter(cases.values()))
    if options.case not in cases:
        problem = f"is {options.case!r}" if options.case else "is needed"
        raise _bad("--case", f"{problem}: {options.workload} has {', '.join(cases)}")
    return cases[options.case]


def _prompts(options: BenchOptions, case: Case | None) -> Prompts:
    _check_sources(options)
    output = _lengths("--output-tokens", options.output_tokens or _OUTPUT_TOKENS)
    if options.prompts is not None:
        return _text_prompts(options.prompts, output)
    low, high = _token_range(options, case)
    lengths: Drawn | Listed
    if case:
        lengths = Listed(list(case.lengths), list(case.at))
    else:
        lengths = Drawn(_lengths("--input-tokens", options.input_tokens or _INPUT_TOKENS), output)
    return TokenPrompts(lengths, low, high, options.prefix_tokens, options.prefix_groups)


def _check_sources(options: BenchOptions) -> None:
    """Refuse what would have no effect beside where the prompts come from."""
    tokens_alone = {
        "--input-tokens": options.input_tokens,
        "--token-range": options.token_range,
        "--prefix-tokens": options.prefix_tokens,
    }
    lengths = {"--input-tokens": options.input_tokens, "--output-tokens": options.output_tokens}
    for source, given, others in (
        ("--prompts", options.prompts, {"--workload": options.workload, **tokens_alone}),
        ("--workload", options.workload, lengths),
    ):
        for other, value in others.items():
            if given and value:
                raise _bad(source, f"can't go with {other}")
    if options.prefix_groups > 1 and not options.prefix_tokens:
        raise _bad("--prefix-groups", "needs --prefix-tokens")


def _text_prompts(path: Path, output: Lengths) -> TextPrompts:
    try:
        texts = read_texts(_read(path, "--prompts"), json_lines=path.suffix == ".jsonl")
    except PromptFileError as error:
        raise _bad("--prompts", f"{path}: {error}") from error
    return TextPrompts(texts, output)


def _token_range(options: BenchOptions, case: Case | None) -> tuple[int, int]:
    if options.token_range is None:
        if case and case.token_low is not None and case.token_high is not None:
            return case.token_low, case.token_high
        return _TOKEN_RANGE
    low, _, high = options.token_range.partition(":")
    if low.isdecimal() and high.isdecimal() and int(low) < int(high) <= 2**32:
        return int(low), int(high)
    raise _bad("--token-range", f"is {options.token_range!r}: write LOW:HIGH, LOW below HIGH")


def _requests(options: BenchOptions, prompts: Prompts, load: Load) -> int | None:
    """How many requests a level sends; None: until its time is over."""
    # Requests that all come at the start would never end by the time alone.
    endless = isinstance(load, Open) and load.rate is None
    if options.requests is not None or (options.duration is not None and not endless):
        return options.requests
    if isinstance(prompts, TextPrompts):
        return len(prompts.texts)
    return len(prompts.lengths.pairs) if isinstance(prompts.lengths, Listed) else _REQUESTS


def _lengths(option: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise _bad(option, str(error)) from error


def _bounds(text: str | None) -> dict[str, float]:
    try:
        return parse_bounds(text) if text is not None else {}
    except ValueError as error:
        raise _bad("--slo", str(error)) from error


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise _bad(option, f"{path} can't be read: {error}") from error


def _target(remotes: Sequence[Remote], connections: int) -> Target:
    one = remotes[0]
    ca, cert, key = (str(path) if path else None for path in (one.ca, one.cert, one.key))
    addresses = [remote.address for remote in remotes]
    return Target(addresses, one.token, one.tls, ca, cert, key, connections)


def _bad(option: str, problem: str) -> typer.BadParameter:
    return typer.BadParameter(problem, param_hint=option)
