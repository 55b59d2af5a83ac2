"""Metrics by the names that OpenTelemetry's RPC and GenAI conventions give them.

The SDK's helpers for the GenAI metrics are deprecated and set no buckets, so the instruments are
named here, with the conventions' buckets as advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from tokenpod.core.messages import Load
from tokenpod.service.serving.generation import Generation

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

Attributes = Mapping[str, str]


class Instruments:
    """Everything that is counted and timed."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._calls = meter.create_histogram(
            "rpc.server.call.duration",
            unit="s",
            description="Duration of rpcs",
            explicit_bucket_boundaries_advisory=_CALL_BUCKETS,
        )
        self._requests = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="Time from a request's arrival to its end",
            explicit_bucket_boundaries_advisory=_REQUEST_BUCKETS,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="Time from a request's arrival to its first token",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN_BUCKETS,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="Mean time of a successful sample's tokens after the first",
            explicit_bucket_boundaries_advisory=_TOKEN_BUCKETS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of a request's prompt and of its output",
            explicit_bucket_boundaries_advisory=_COUNT_BUCKETS,
        )

    def record_call(self, seconds: float, attributes: Attributes) -> None:
        """One rpc has ended."""
        self._calls.record(seconds, attributes)

    def record_generation(
        self, generation: Generation, seconds: float, attributes: Attributes, error: str | None
    ) -> None:
        """One request has ended after `seconds`.

        Args:
            attributes: the GenAI convention's for metrics.
            error: the status code it ended with, unless OK.
        """
        ended = {**attributes, "error.type": error} if error else attributes
        self._requests.record(seconds, ended)
        begun = [sample for sample in generation.samples if sample.first_token_at]
        if begun:
            first = min(sample.first_token_at for sample in begun)
            waited = max(first - generation.request.arrived_at, 0)
            self._first_token.record(waited / 1e9, attributes)
        for sample in begun:
            if sample.generated > 1 and not error:
                took = (sample.last_token_at - sample.first_token_at) / 1e9
                self._per_token.record(took / (sample.generated - 1), attributes)
        output = sum(sample.generated for sample in generation.samples)
        counts = {"input": len(generation.request.prompt), "output": output}
        for kind, count in counts.items():
            self._tokens.record(count, {**attributes, "gen_ai.token.type": kind})

    def watch(self, load: Callable[[], Load]) -> None:
        """Observe the engine's load."""

        def gauge(name: str, unit: str, description: str, read: Callable[[Load], float]) -> None:
            def observe(options: CallbackOptions) -> Iterable[Observation]:
                return [Observation(read(load()))]

            self._meter.create_observable_gauge(name, [observe], unit, description)

        gauge(
            "tokenpod.queue.requests",
            "{request}",
            "Requests that wait for their first step",
            lambda now: now.waiting,
        )
        gauge(
            "tokenpod.requests.running",
            "{request}",
            "Sequences that the engine is working on",
            lambda now: now.running,
        )
        gauge(
            "tokenpod.kv.utilization",
            "1",
            "Share of the KV slots that somebody uses; what is only cached does not count",
            _utilization,
        )

        def preemptions(options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(load().preemptions)]

        self._meter.create_observable_counter(
            "tokenpod.preemptions",
            [preemptions],
            "{preemption}",
            "Running sequences whose memory was taken, to be computed again",
        )


def _utilization(load: Load) -> float:
    used = load.slots - load.free_slots - load.evictable_slots
    return used / load.slots if load.slots else 0.0
