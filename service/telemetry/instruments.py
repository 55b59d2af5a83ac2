"""Metrics by the names that OpenTelemetry's RPC and GenAI conventions give them.

The SDK's helpers for the GenAI metrics are deprecated and set no buckets, so the instruments are
named here, with the conventions' buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from tokenpod.core.outputs import Load, MaskCounts, StepCounts
from tokenpod.service.calls.generation import Generation
from tokenpod.service.telemetry.histograms import Attributes, Histograms, Series
from tokenpod.service.telemetry.recorder import PodReadings
from tokenpod.service.telemetry.server_calls import PHASES, generation_phases

_REQUEST_BUCKETS = [0.01 * 2**power for power in range(14)]
_FIRST_TOKEN_BUCKETS = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
]
_TOKEN_BUCKETS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
_COUNT_BUCKETS = [float(4**power) for power in range(14)]
#: The convention ends at 10 s, which a stream of tokens easily outlasts.
_CALL_BUCKETS = [
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
]

#: Of the front ends' event loops, which turn in less than a millisecond.
_LAG_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0]

Callback = Callable[[CallbackOptions], Iterable[Observation]]


@dataclass(frozen=True, slots=True)
class _RequestSeries:
    """Where requests with the same attributes are recorded."""

    request: Series
    first_token: Series
    per_token: Series
    input: Series
    output: Series
    phases: dict[str, Series]


class Instruments:
    """Everything that is counted and timed.

    Args:
        meter: makes the SDK's instruments.
        histograms: get those that are recorded with each call; readers know them, too.
    """

    def __init__(self, meter: Meter, histograms: Histograms) -> None:
        self._meter = meter
        histogram = functools.partial(histograms.add, meter)
        self._series = functools.lru_cache(maxsize=256)(self._series_of)
        self._calls = histogram("rpc.server.call.duration", "s", "Duration of rpcs", _CALL_BUCKETS)
        self._requests = histogram(
            "gen_ai.server.request.duration",
            "s",
            "Time from a request's arrival to its end",
            _REQUEST_BUCKETS,
        )
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time from a request's arrival to its first token",
            _FIRST_TOKEN_BUCKETS,
        )
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Mean time of a successful sample's tokens after the first",
            _TOKEN_BUCKETS,
        )
        self._tokens = histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens of a request's prompt and of its output",
            _COUNT_BUCKETS,
        )
        self._phases = histogram(
            "tokenpod.request.phase.duration",
            "s",
            "Time of a request's phases that have ended: queue, prefill, decode",
            _REQUEST_BUCKETS,
        )
        self._lag = histogram(
            "tokenpod.front_end.lag",
            "s",
            "How late front ends' event loops ran a timer, looked at four times per second",
            _LAG_BUCKETS,
        )
        self._failed = meter.create_counter(
            "tokenpod.calls.failed",
            "{call}",
            "Calls that ended with another status than OK, by reason and phase",
        )
        self._adapter_requests = meter.create_up_down_counter(
            "tokenpod.adapter.requests",
            "{request}",
            "Requests under way, by the adapter that they name",
        )

    def record_call(self, seconds: float, attributes: Attributes) -> None:
        """One rpc has ended."""
        self._calls.record(seconds, attributes)

    def record_failure(self, attributes: Attributes, reason: str, phase: str) -> None:
        """One rpc has ended with another status than OK, which `attributes` name."""
        said = {**attributes, "tokenpod.reason": reason, "tokenpod.phase": phase}
        self._failed.add(1, said)

    def record_lag(self, seconds: float) -> None:
        """The event loop has run a timer so late."""
        self._lag.record(seconds, {})

    def add_adapter_requests(self, adapter: str, number: int) -> None:
        """Requests that name this adapter have come, or gone if the number is negative."""
        self._adapter_requests.add(number, {"tokenpod.adapter": adapter})

    def record_generation(
        self, generation: Generation, seconds: float, attributes: Attributes, error: str | None
    ) -> None:
        """One request has ended after `seconds`.

        Args:
            attributes: the GenAI convention's for metrics.
            error: the status code it ended with, unless OK.
        """
        series = self._series(tuple(attributes.items()))
        if error:
            self._requests.record(seconds, {**attributes, "error.type": error})
        else:
            series.request.record(seconds)
        begun = [sample for sample in generation.samples if sample.first_token_at]
        if begun:
            first = min([sample.first_token_at for sample in begun])
            series.first_token.record(max(first - generation.request.arrived_at, 0) / 1e9)
        for name, began, ended_at in generation_phases(generation):
            if ended_at is not None:
                series.phases[name].record(max(ended_at - began, 0) / 1e9)
        for sample in begun:
            if sample.generated > 1 and not error:
                took = (sample.last_token_at - sample.first_token_at) / 1e9
                series.per_token.record(took / (sample.generated - 1))
        series.input.record(len(generation.request.prompt))
        series.output.record(sum([sample.generated for sample in generation.samples]))

    def _series_of(self, attributes: tuple[tuple[str, str], ...]) -> _RequestSeries:
        of = dict(attributes)

        def tokens(kind: str) -> Series:
            return self._tokens.at({**of, "gen_ai.token.type": kind})

        return _RequestSeries(
            request=self._requests.at(of),
            first_token=self._first_token.at(of),
            per_token=self._per_token.at(of),
            input=tokens("input"),
            output=tokens("output"),
            phases={name: self._phases.at({**of, "tokenpod.phase": name}) for name in PHASES},
        )

    def watch(self, load: Callable[[], Load]) -> None:
        """Observe the engine's load."""

        def observing(read: Callable[[Load], float]) -> list[Callback]:
            return [lambda options: [Observation(read(load()))]]

        gauge, counter = self._meter.create_observable_gauge, self._meter.create_observable_counter
        gauge(
            "tokenpod.queue.requests",
            observing(lambda now: now.waiting),
            "{request}",
            "Requests that wait for their first step",
        )
        gauge(
            "tokenpod.requests.running",
            observing(lambda now: now.running),
            "{request}",
            "Sequences that the engine is working on",
        )
        gauge(
            "tokenpod.kv.utilization",
            observing(_utilization),
            "1",
            "Share of the KV slots that somebody uses; what is only cached does not count",
        )
        gauge(
            "tokenpod.kv.tokens",
            [lambda options: list(_slots(load()))],
            "{token}",
            "KV slots: used, evictable (cached, without a user), free",
        )
        gauge(
            "tokenpod.queue.tokens",
            observing(lambda now: now.waiting_tokens),
            "{token}",
            "Tokens that waiting requests need computed",
        )
        for name, unit, meaning, count in _STEPS:
            counter(
                name,
                [lambda options, count=count: [Observation(count(load().steps))]],  # type: ignore[misc]
                unit,
                meaning,
            )
        gauge(
            "tokenpod.adapters.running",
            observing(lambda now: now.adapters),
            "{adapter}",
            "Different adapters of running sequences",
        )
        for name, read, meaning in _DRAFTS:
            counter(
                name,
                [lambda options, read=read: _by_position(read(load()))],  # type: ignore[misc]
                "{token}",
                meaning,
            )
        counter(
            "tokenpod.prefix.tokens",
            [lambda options: list(_prefixes(load()))],
            "{token}",
            "Tokens of prompts: cached, or computed; and those that the cache has evicted",
        )
        counter(
            "tokenpod.preemptions",
            observing(lambda now: now.preemptions),
            "{preemption}",
            "Running sequences whose memory was taken, to be computed again",
        )
        gauge(
            "tokenpod.requests.swapped",
            observing(lambda now: now.swapped),
            "{request}",
            "Preempted sequences whose keys and values wait in the host's memory",
        )
        counter(
            "tokenpod.swapped_tokens",
            observing(lambda now: now.swapped_tokens),
            "{token}",
            "Tokens whose keys and values went to the host's memory by preemptions",
        )
        counter(
            "tokenpod.fetched_tokens",
            observing(lambda now: now.fetched_tokens),
            "{token}",
            "Tokens whose keys and values came back from the host's memory",
        )
        gauge(
            "tokenpod.host_kv.utilization",
            observing(lambda now: now.offload_used_slots / max(now.offload_slots, 1)),
            "1",
            "Share of the host's memory for keys and values that is taken",
        )
        counter(
            "tokenpod.requests.ended",
            [lambda options: list(_ended(load()))],
            "{request}",
            "Requests that have ended, by how: stopped, length, aborted, ignored",
        )
        self._watch_masks(load)

    def watch_pod(self, read: Callable[[], PodReadings]) -> None:
        """Observe what the first front end knows of the pod."""
        for name, unit, meaning, of in _POD:

            def observe(
                options: CallbackOptions, of: Callable[[PodReadings], float | None] = of
            ) -> list[Observation]:
                value = of(read())
                return [] if value is None else [Observation(value)]

            self._meter.create_observable_gauge(name, [observe], unit, meaning)

    def _watch_masks(self, load: Callable[[], Load]) -> None:
        """Observe what constraints cost the engine."""
        for name, unit, meaning, read in _MASKS:
            self._meter.create_observable_counter(name, [_observing(load, read)], unit, meaning)


#: Of steps: name, unit, meaning, value.
_STEPS: Sequence[tuple[str, str, str, Callable[[StepCounts], float]]] = (
    ("tokenpod.steps", "{step}", "Steps of the engine", lambda now: now.steps),
    (
        "tokenpod.steps.time",
        "s",
        "Time with a step under way; the engine is idle for the rest",
        lambda now: now.busy_ns / 1e9,
    ),
    ("tokenpod.steps.rows", "{sequence}", "Sequences of all steps", lambda now: now.rows),
    ("tokenpod.steps.tokens", "{token}", "Tokens that steps computed", lambda now: now.tokens),
    (
        "tokenpod.steps.compilations",
        "{kernel}",
        "Kernels of a GPU that were compiled while a step waited",
        lambda now: now.compiled,
    ),
)

#: Of the pod: name, unit, meaning, value.
_POD: Sequence[tuple[str, str, str, Callable[[PodReadings], float | None]]] = (
    ("tokenpod.start.time", "s", "Unix time of the pod's start", lambda now: now.started_at),
    ("tokenpod.ready", "{pod}", "1 if the model serves, else 0", lambda now: int(now.ready)),
    (
        "tokenpod.engine.stalled",
        "{pod}",
        "1 if the engine makes no progress with work that it has, else 0",
        lambda now: int(now.stalled),
    ),
    (
        "tokenpod.requests.admitted",
        "{request}",
        "Requests that hold a place, running and waiting",
        lambda now: now.admitted,
    ),
    ("tokenpod.calls.memory", "By", "Memory that calls hold", lambda now: now.call_bytes),
    (
        "tokenpod.calls.memory.limit",
        "By",
        "The most that calls may hold",
        lambda now: now.most_call_bytes,
    ),
    (
        "tokenpod.tls.certificate.expiry",
        "s",
        "Unix time at which the server's certificate expires",
        lambda now: now.certificate_expires,
    ),
)

#: Of constrained texts: name, unit, meaning, value.
_MASKS: Sequence[tuple[str, str, str, Callable[[MaskCounts], float]]] = (
    ("tokenpod.constraints.masks", "{mask}", "Masks that steps needed", lambda now: now.needed),
    (
        "tokenpod.constraints.masks.late",
        "{mask}",
        "Masks that came too late for their step",
        lambda now: now.late,
    ),
    (
        "tokenpod.constraints.masks.time",
        "s",
        "Time of all workers in masks",
        lambda now: now.nanoseconds / 1e9,
    ),
    (
        "tokenpod.constraints.compiled",
        "{constraint}",
        "Constraints that were compiled",
        lambda now: now.compiled,
    ),
    (
        "tokenpod.constraints.cached",
        "{constraint}",
        "Constraints that were compiled already",
        lambda now: now.cached,
    ),
    (
        "tokenpod.constraints.refused",
        "{constraint}",
        "Constraints that did not compile",
        lambda now: now.refused,
    ),
)


def _observing(load: Callable[[], Load], read: Callable[[MaskCounts], float]) -> Callback:
    return lambda options: [Observation(read(load().masks))]


def _slots(load: Load) -> Iterator[Observation]:
    used = load.slots - load.free_slots - load.evictable_slots
    counts = {"used": used, "evictable": load.evictable_slots, "free": load.free_slots}
    for name, count in counts.items():
        yield Observation(count, {"tokenpod.kv.state": name})


def _prefixes(load: Load) -> Iterator[Observation]:
    computed = load.prompt_tokens - load.cached_tokens
    counts = {"cached": load.cached_tokens, "computed": computed, "evicted": load.evicted_tokens}
    for name, count in counts.items():
        yield Observation(count, {"tokenpod.prefix": name})


def _ended(load: Load) -> Iterator[Observation]:
    for name in load.ended.__struct_fields__:
        yield Observation(getattr(load.ended, name), {"tokenpod.end": name})


#: `tokenpod.draft.position` is 1 for the first draft behind a known token.
_DRAFTS: list[tuple[str, Callable[[Load], list[int]], str]] = [
    ("tokenpod.draft.tokens", lambda now: now.drafted_at, "Tokens that were drafted"),
    ("tokenpod.draft.accepted_tokens", lambda now: now.accepted_at, "Those that were accepted"),
]


def _by_position(counts: list[int]) -> list[Observation]:
    return [
        Observation(count, {"tokenpod.draft.position": at})
        for at, count in enumerate(counts, start=1)
    ]


def _utilization(load: Load) -> float:
    used = load.slots - load.free_slots - load.evictable_slots
    return used / load.slots if load.slots else 0.0
