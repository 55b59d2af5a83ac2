"""The report of a whole command. Its JSON form is an interface: `SCHEMA_VERSION` says which.

A field may be added without a new version; one that changes its meaning or goes away needs one.
Names end in their unit: `_s` is seconds, `_per_s` a rate. docs/benchmarking.md explains each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from tokenpod.cli.bench.arrivals import Closed, Open, Replay
from tokenpod.cli.bench.figures import Latency, Spread, latency, spread, within
from tokenpod.cli.bench.fleet import Measured
from tokenpod.cli.bench.messages import Record

SCHEMA_VERSION = 1

#: Share of one core above which a client process is no neutral observer.
BUSY_LIMIT = 0.85
#: The same of its event loop's lateness, 99th percentile, in seconds.
LAG_LIMIT_S = 0.010
#: Tokens found in the cache beyond the shared prefixes, as a share of the prompts'.
CACHED_LIMIT = 0.1


class LoadShape(msgspec.Struct, frozen=True):
    """The load of a level: `mode` is closed, open or replay; null is unbounded, or not its."""

    mode: str
    concurrency: int | None
    request_rate: float | None
    burstiness: float | None


class Requests(msgspec.Struct, frozen=True):
    """How many requests there were, and what became of them.

    Args:
        offered_per_s: requests per second that were due: with random arrivals a little more or less
            than was asked for. None in a closed loop, and if all are sent at once.
        errors: failed requests by status code.
        first_error: what the first failed one said, or None.
    """

    sent: int
    offered_per_s: float | None
    succeeded: int
    failed: int
    errors: dict[str, int]
    first_error: str | None


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of successful requests, as the server counts prompts and as outputs came.

    Args:
        cached: prompt tokens that the server found in its cache.
        of_failed: output tokens that came of requests which failed later.
        per_message: output tokens over messages that held any.
    """

    prompt: int
    cached: int
    output: int
    of_failed: int
    per_message: float | None


class Throughput(msgspec.Struct, frozen=True):
    """Successful requests, and their tokens, over the level's duration."""

    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


class LatencySpreads(msgspec.Struct, frozen=True):
    """Latencies of successful requests, as `figures` defines them."""

    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread


class ServerSpreads(msgspec.Struct, frozen=True):
    """What the server itself measured: waiting in its queue, and its time to the first token."""

    queue: Spread
    ttft: Spread


class Goodput(msgspec.Struct, frozen=True):
    """Requests that succeeded within every bound.

    Args:
        bounds_s: seconds by latency.
        share: of all that were sent.
    """

    bounds_s: dict[str, float]
    requests: int
    requests_per_s: float
    share: float


class Clients(msgspec.Struct, frozen=True):
    """Whether the load generator itself was a limit.

    Args:
        busy: CPU time over time, of each process.
        loop_lag_s: how late their event loops came.
        send_lag_s: from when a request was due until it was sent.
    """

    processes: int
    busy: list[float]
    loop_lag_s: Spread
    send_lag_s: Spread


class TargetShare(msgspec.Struct, frozen=True):
    """What one server did."""

    address: str
    sent: int
    succeeded: int
    output_tokens: int
    ttft_s: Spread


class LevelReport(msgspec.Struct, frozen=True):
    """One load and what came of it.

    Args:
        duration_s: from the level's start until its last request had ended.
        warnings: what makes the figures doubtful, in sentences.
    """

    load: LoadShape
    duration_s: float
    requests: Requests
    tokens: Tokens
    throughput: Throughput
    latency_s: LatencySpreads
    server_s: ServerSpreads
    goodput: Goodput | None
    clients: Clients
    targets: list[TargetShare]
    warnings: list[str]


class Report(msgspec.Struct, frozen=True):
    """Everything one command measured.

    Args:
        started_at: UTC, ISO 8601.
        seed: which repeats prompts, lengths and arrivals.
        model_ids: what the servers call their models, by address.
        options: the command's options as they were used, by name.
    """

    schema_version: int
    tokenpod_version: str
    started_at: str
    seed: int
    model_ids: dict[str, str | None]
    options: dict[str, Any]
    levels: list[LevelReport]


def level_report(
    measured: Measured,
    addresses: list[str],
    bounds: Mapping[str, float],
    prefix_tokens: int | None,
) -> LevelReport:
    """Derive one level's figures.

    Args:
        addresses: of the servers, as the records count them.
        bounds: for goodput, seconds by latency; empty: no goodput.
        prefix_tokens: tokens of each prompt that may well be cached; None: any number.
    """
    records = measured.records
    found = {record.index: latency(record) for record in records}
    good = [record for record in records if record.ok]
    duration = max((record.ended for record in records), default=0.0)
    tokens = _tokens(records, found)
    clients = _clients(measured)
    prefix_share = None
    if prefix_tokens is not None and tokens.prompt:
        prefix_share = prefix_tokens * len(good) / tokens.prompt
    return LevelReport(
        load=_shape(measured),
        duration_s=duration,
        requests=_requests(measured),
        tokens=tokens,
        throughput=Throughput(
            _rate(len(good), duration),
            _rate(tokens.output, duration),
            _rate(tokens.prompt + tokens.output, duration),
        ),
        latency_s=latency_spreads([found[record.index] for record in good]),
        server_s=ServerSpreads(
            spread([record.queue_s for record in good]),
            spread([record.first_token_s for record in good]),
        ),
        goodput=_goodput(records, found, bounds, duration) if bounds else None,
        clients=clients,
        targets=[
            _target(address, [r for r in records if r.target == i], found)
            for i, address in enumerate(addresses)
        ],
        warnings=_warnings(clients, tokens, prefix_share),
    )


def latency_spreads(found: list[Latency]) -> LatencySpreads:
    """The spread of each latency over requests."""
    return LatencySpreads(
        **{name: spread(values) for name, values in latency_values(found).items()}
    )


def latency_values(found: list[Latency]) -> dict[str, np.ndarray]:
    """Every value of each latency, by name, in seconds."""
    none = [np.zeros(0)]
    return {
        "ttft": np.asarray([f.ttft for f in found if f.ttft is not None], np.float64),
        "itl": np.concatenate(none + [f.itl for f in found]),
        "tpot": np.concatenate(none + [f.tpot for f in found]),
        "e2e": np.asarray([f.e2e for f in found], np.float64),
    }


def _shape(measured: Measured) -> LoadShape:
    match measured.level.load:
        case Closed(concurrency):
            return LoadShape("closed", concurrency, None, None)
        case Open(rate, burstiness, most):
            return LoadShape("open", most, rate, burstiness)
        case Replay(rate, most):
            return LoadShape("replay", most, rate, None)


def _requests(measured: Measured) -> Requests:
    records = measured.records
    closed = isinstance(measured.level.load, Closed)
    last_due = 0.0 if closed else max((record.due for record in records), default=0.0)
    failed = [record for record in records if not record.ok]
    first = min(failed, key=lambda record: record.ended, default=None)
    errors = Counter(record.code for record in failed)
    return Requests(
        sent=len(records),
        offered_per_s=len(records) / last_due if last_due else None,
        succeeded=len(records) - len(failed),
        failed=len(failed),
        errors=dict(errors.most_common()),
        first_error=f"{first.code}: {' '.join(first.detail.split())}" if first else None,
    )


def _tokens(records: list[Record], found: Mapping[int, Latency]) -> Tokens:
    good = [record for record in records if record.ok]
    output = sum(found[record.index].output_tokens for record in good)
    messages = sum(len(record.times) for record in good) // np.dtype(np.float64).itemsize
    return Tokens(
        prompt=sum(record.prompt_tokens for record in good),
        cached=sum(record.cached_tokens for record in good),
        output=output,
        of_failed=sum(found[r.index].output_tokens for r in records if not r.ok),
        per_message=output / messages if messages else None,
    )


def _goodput(
    records: list[Record],
    found: Mapping[int, Latency],
    bounds: Mapping[str, float],
    duration: float,
) -> Goodput:
    kept = sum(record.ok and within(bounds, found[record.index]) for record in records)
    share = kept / len(records) if records else 0.0
    return Goodput(dict(bounds), kept, _rate(kept, duration), share)


def _clients(measured: Measured) -> Clients:
    return Clients(
        processes=len(measured.clients),
        busy=[client.busy for client in measured.clients],
        loop_lag_s=spread(measured.lags),
        send_lag_s=spread([record.sent - record.due for record in measured.records]),
    )


def _target(address: str, records: list[Record], found: Mapping[int, Latency]) -> TargetShare:
    good = [found[record.index] for record in records if record.ok]
    first = spread([f.ttft for f in good if f.ttft is not None])
    tokens = sum(f.output_tokens for f in good)
    return TargetShare(address, len(records), len(good), tokens, first)


def _warnings(clients: Clients, tokens: Tokens, prefix_share: float | None) -> list[str]:
    found = []
    busiest = max(clients.busy, default=0.0)
    if busiest > BUSY_LIMIT:
        found.append(
            f"a client process was busy for {busiest:.0%} of the time (limit {BUSY_LIMIT:.0%}):"
            " latencies contain its own delay; use more --processes"
        )
    lag = clients.loop_lag_s.p99
    if lag is not None and lag > LAG_LIMIT_S:
        found.append(
            f"the clients came {lag * 1e3:.0f} ms late at the 99th percentile (limit"
            f" {LAG_LIMIT_S * 1e3:.0f} ms): they lack CPU; run them on another machine"
        )
    cached = tokens.cached / tokens.prompt if tokens.prompt else 0.0
    if prefix_share is not None and cached > prefix_share + CACHED_LIMIT:
        found.append(
            f"{cached:.0%} of the prompts' tokens were cached, and shared prefixes are"
            f" {prefix_share:.0%}: the server has seen these prompts; use another --seed"
        )
    return found


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
