"""The report of a whole command. Its JSON form is an interface: `SCHEMA_VERSION` says which.

A field may be added without a new version; one that changes its meaning or goes away needs one.
docs/benchmarking.md explains each field; a section's field says how it follows from what was
measured. Names end in their unit: `_s` is seconds, `_per_s` a rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from tokenpod_client.cli.bench.figures import Spread, spread, total, values, within
from tokenpod_client.cli.bench.fleet import Measured
from tokenpod_client.cli.bench.messages import Load

SCHEMA_VERSION = 1

#: CPU time over time above which a client process is no neutral observer.
BUSY_LIMIT = 0.85
#: Lateness of its event loop above which it isn't either: 99th percentile, in seconds.
LAG_LIMIT_S = 0.010
#: Tokens found in the cache beyond the common prefixes, over the prompts' tokens.
CACHED_LIMIT = 0.1

Value = TypeVar("Value")


def figure(of: Callable[[Measured], Value]) -> Value:
    """A field of a section, with how it is derived."""
    found: Value = field(metadata={"of": of})
    return found


def section(kind: type[Value], measured: Measured) -> Value:
    """A section with the figures of one level."""
    found: Any = kind
    return kind(**{each.name: each.metadata["of"](measured) for each in fields(found)})


@dataclass(frozen=True)
class Requests:
    """How many requests there were, and what became of them."""

    sent: int = figure(lambda m: len(m.requests))
    offered_per_s: float | None = figure(lambda m: _offered_per_s(m))
    succeeded: int = figure(lambda m: len(m.good))
    failed: int = figure(lambda m: len(m.failed))
    errors: dict[str, int] = figure(
        lambda m: dict(Counter(each.code for each in m.failed).most_common())
    )
    first_error: str | None = figure(lambda m: first_error(m))


@dataclass(frozen=True)
class Tokens:
    """Tokens of successful requests, as the server counts prompts and as outputs came."""

    prompt: int = figure(lambda m: total(m.good, "prompt_tokens"))
    cached: int = figure(lambda m: total(m.good, "cached_tokens"))
    output: int = figure(lambda m: total(m.good, "output_tokens"))
    of_failed: int = figure(lambda m: total(m.failed, "output_tokens"))
    per_message: float | None = figure(
        lambda m: _over(total(m.good, "output_tokens"), total(m.good, "messages")) or None
    )


@dataclass(frozen=True)
class Throughput:
    """Successful requests, and their tokens, over the level's duration."""

    requests_per_s: float = figure(lambda m: _over(len(m.good), m.duration))
    output_tokens_per_s: float = figure(lambda m: _over(total(m.good, "output_tokens"), m.duration))
    total_tokens_per_s: float = figure(
        lambda m: _over(total(m.good, "prompt_tokens") + total(m.good, "output_tokens"), m.duration)
    )


@dataclass(frozen=True)
class LatencySpreads:
    """Latencies of successful requests, as `figures` defines them."""

    ttft: Spread = figure(lambda m: spread(values(m.good, "ttft")))
    itl: Spread = figure(lambda m: spread(values(m.good, "itl")))
    tpot: Spread = figure(lambda m: spread(values(m.good, "tpot")))
    e2e: Spread = figure(lambda m: spread(values(m.good, "e2e")))


@dataclass(frozen=True)
class ServerSpreads:
    """What the server itself measured: waiting in its queue, and its time to the first token."""

    queue: Spread = figure(lambda m: spread(values(m.good, "queue_s")))
    ttft: Spread = figure(lambda m: spread(values(m.good, "first_token_s")))


@dataclass(frozen=True)
class Goodput:
    """Requests that succeeded within every bound."""

    bounds_s: dict[str, float] = figure(lambda m: m.plan.bounds)
    requests: int = figure(lambda m: _kept(m))
    requests_per_s: float = figure(lambda m: _over(_kept(m), m.duration))
    share: float = figure(lambda m: _over(_kept(m), len(m.requests)))


@dataclass(frozen=True)
class Clients:
    """Whether the load generator itself was a limit."""

    processes: int = figure(lambda m: len(m.outcomes))
    busy: list[float] = figure(lambda m: [outcome.busy for outcome in m.outcomes])
    loop_lag_s: Spread = figure(
        lambda m: spread([lag for outcome in m.outcomes for lag in outcome.lags])
    )
    send_lag_s: Spread = figure(lambda m: spread([each.sent - each.due for each in m.requests]))


@dataclass(frozen=True)
class TargetReport:
    """What one server did."""

    address: str
    sent: int
    succeeded: int
    output_tokens: int
    ttft_s: Spread


@dataclass(frozen=True)
class LevelReport:
    """One load and what came of it."""

    load: Load = figure(lambda m: m.level.load)
    duration_s: float = figure(lambda m: m.duration)
    requests: Requests = figure(lambda m: section(Requests, m))
    tokens: Tokens = figure(lambda m: section(Tokens, m))
    throughput: Throughput = figure(lambda m: section(Throughput, m))
    latency_s: LatencySpreads = figure(lambda m: section(LatencySpreads, m))
    server_s: ServerSpreads = figure(lambda m: section(ServerSpreads, m))
    goodput: Goodput | None = figure(lambda m: section(Goodput, m) if m.plan.bounds else None)
    clients: Clients = figure(lambda m: section(Clients, m))
    targets: list[TargetReport] = figure(lambda m: list(_targets(m)))
    warnings: list[str] = figure(lambda m: list(_warnings(m)))


@dataclass(frozen=True)
class Report:
    """Everything one command measured."""

    schema_version: int
    tokenpod_version: str
    started_at: str
    seed: int
    model_ids: dict[str, str | None]
    options: dict[str, Any]
    levels: list[LevelReport]


def _offered_per_s(m: Measured) -> float | None:
    if m.level.load.mode == "closed":
        return None
    return _over(len(m.requests), max((e.due for e in m.requests), default=0.0)) or None


def first_error(m: Measured) -> str | None:
    """What the request said that failed first, or None."""
    first = min(m.failed, key=lambda r: r.ended, default=None)
    return f"{first.code}: {' '.join(first.detail.split())}" if first else None


def _kept(m: Measured) -> int:
    return sum(within(m.plan.bounds, each) for each in m.good)


def _targets(m: Measured) -> Iterator[TargetReport]:
    for target, remote in enumerate(m.plan.remotes):
        good = [each for each in m.good if each.target == target]
        yield TargetReport(
            address=remote.address,
            sent=sum(each.target == target for each in m.requests),
            succeeded=len(good),
            output_tokens=total(good, "output_tokens"),
            ttft_s=spread(values(good, "ttft")),
        )


def _warnings(m: Measured) -> Iterator[str]:
    busiest = max((outcome.busy for outcome in m.outcomes), default=0.0)
    if busiest > BUSY_LIMIT:
        yield (
            f"a client process was busy for {busiest:.0%} of the time (limit {BUSY_LIMIT:.0%}):"
            " latencies contain its own delay; use more --processes"
        )
    lag = section(Clients, m).loop_lag_s.p99 or 0.0
    if lag > LAG_LIMIT_S:
        yield (
            f"the clients came {lag * 1e3:.0f} ms late at the 99th percentile (limit"
            f" {LAG_LIMIT_S * 1e3:.0f} ms): they lack CPU; run them on another machine"
        )
    prompts, tokens = m.plan.prompts, total(m.good, "prompt_tokens")
    cached = _over(total(m.good, "cached_tokens"), tokens)
    # A file of prompts may well repeat some of them.
    expected = 1.0 if prompts.texts else _over(prompts.prefix_tokens * len(m.good), tokens)
    if cached > expected + CACHED_LIMIT:
        yield (
            f"{cached:.0%} of the prompts' tokens were cached, and shared prefixes are"
            f" {expected:.0%}: the server has seen these prompts; use another --seed"
        )


def _over(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
