"""Spans and metrics as a real collector receives them, over OTLP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from support.clients.rpcs import (
    KINDS,
    SERVICE,
    Scripted,
    arities,
    call_kind,
    nothing,
    outlast,
    serving,
)
from support.outside.collector import Collector, attributes, collecting
from tokenpod.core.outputs import Ended, FinishCode, Load, MaskCounts, Started
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.service.calls.errors import (
    DataLoss,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from tokenpod.service.calls.generation import Generation
from tokenpod.service.calls.sample import Ending, Sample
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.interceptors import ErrorInterceptor
from tokenpod.service.rpc.reflection import enable_reflection
from tokenpod.service.telemetry.choice import telemetry_of
from tokenpod.service.telemetry.recorder import PodReadings, Telemetry
from tokenpod.service.telemetry.server_calls import current_call
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

GENERATE = "generate.v3.TextGenerationService/Generate"
INFO = "generate.v3.TextGenerationService/Info"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
MS = 1_000_000


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def telemetry(collector: Collector) -> Telemetry:
    """Tests shut it down: that sends everything."""
    return telemetry_of(
        ServerSettings(otlp_endpoint=collector.endpoint, otlp_service_name="tokenpod-test")
    )


def interceptors(telemetry: Telemetry) -> list[grpc.aio.ServerInterceptor]:
    """As the server has them: telemetry sees what the others make of a call."""
    return [*telemetry.interceptors(TABLE), ErrorInterceptor()]


async def forever(context: Any) -> None:
    await asyncio.sleep(60)


async def call_info(telemetry: Telemetry, act: Any = nothing, **call: Any) -> None:
    """One Info call, whatever comes of it."""
    async with serving(servicer=Scripted(act), interceptors=interceptors(telemetry)) as running:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await running.stub.Info(pb.InfoRequest(), **call)


@pytest.mark.pod
def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys\n"
        "from tokenpod.service.config.sources import ServerSettings\n"
        "from tokenpod.service.telemetry.choice import telemetry_of\n"
        "telemetry = telemetry_of(ServerSettings())\n"
        "telemetry.watch(lambda: 1 / 0)\n"
        "telemetry.shutdown()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_a_call_is_a_server_span_with_the_current_attributes(
    telemetry: Telemetry, collector: Collector
) -> None:
    await call_info(telemetry)
    telemetry.shutdown()
    span = collector.span(INFO)
    assert span.kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    found = attributes(span)
    assert found["rpc.system.name"] == "grpc"
    assert found["rpc.method"] == INFO
    assert found["rpc.response.status_code"] == "OK"
    assert found["network.peer.address"] == "127.0.0.1"
    assert isinstance(found["network.peer.port"], int)
    assert "error.type" not in found
    assert collector.resources[0]["service.name"] == "tokenpod-test"


async def test_each_front_end_counts_for_itself(collector: Collector) -> None:
    for _ in range(2):
        telemetry = telemetry_of(
            ServerSettings(otlp_endpoint=collector.endpoint, otlp_service_name="tokenpod-test")
        )
        await call_info(telemetry)
        telemetry.shutdown()
    one, other = (resource["service.instance.id"] for resource in collector.resources)
    assert one != other


async def test_the_callers_trace_goes_on(telemetry: Telemetry, collector: Collector) -> None:
    parent = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")
    await call_info(telemetry, metadata=(parent,))
    telemetry.shutdown()
    span = collector.span(INFO)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)


async def test_a_broken_traceparent_begins_a_new_trace(
    telemetry: Telemetry, collector: Collector
) -> None:
    await call_info(telemetry, metadata=(("traceparent", "00-nonsense"),))
    telemetry.shutdown()
    assert not collector.span(INFO).parent_span_id


async def test_the_callers_decision_not_to_sample_is_kept(
    telemetry: Telemetry, collector: Collector
) -> None:
    await call_info(telemetry, metadata=(("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00"),))
    telemetry.shutdown()
    assert collector.spans == []
    assert len(collector.points("rpc.server.call.duration")) == 1, "metrics know no sampling"


async def test_a_sample_ratio_of_zero_sends_no_spans(collector: Collector) -> None:
    settings = ServerSettings(otlp_endpoint=collector.endpoint, otlp_sample_ratio=0.0)
    telemetry = telemetry_of(settings)
    await call_info(telemetry)
    telemetry.shutdown()
    assert collector.spans == []


async def test_a_unix_socket_is_a_peer(
    telemetry: Telemetry, collector: Collector, tmp_path: Path
) -> None:
    async with serving(
        servicer=Scripted(), interceptors=interceptors(telemetry), address=f"unix:{tmp_path}/s"
    ) as running:
        await running.stub.Info(pb.InfoRequest())
    telemetry.shutdown()
    found = attributes(collector.span(INFO))
    assert found["network.transport"] == "unix"
    assert not {"network.peer.port", "net.peer.ip", "net.peer.port"} & set(found)


async def invalid(context: Any) -> None:
    raise InvalidArgument("stopping.max_new_tokens", "is 0; at least 1")


async def nan(context: Any) -> None:
    raise DataLoss("the model computed NaN")


async def bug(context: Any) -> None:
    raise ZeroDivisionError("a bug")


async def full(context: Any) -> None:
    raise ResourceExhausted("the queue is full", limit="max_queue_tokens")


async def draining(context: Any) -> None:
    raise Unavailable("the server is draining", state="draining")


async def abort(context: Any) -> None:
    await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")


@pytest.mark.parametrize(
    ("act", "code", "number", "is_error", "exceptions"),
    [
        (invalid, "INVALID_ARGUMENT", 3, False, []),
        (abort, "NOT_FOUND", 5, False, []),
        (nan, "DATA_LOSS", 15, True, ["tokenpod.service.calls.errors.DataLoss"]),
        (bug, "INTERNAL", 13, True, ["ZeroDivisionError"]),
    ],
)
async def test_a_failure_has_its_code_and_its_exception_once(
    telemetry: Telemetry,
    collector: Collector,
    act: Any,
    code: str,
    number: int,
    is_error: bool,
    exceptions: list[str],
) -> None:
    await call_info(telemetry, act)
    telemetry.shutdown()
    span = collector.span(INFO)
    found = attributes(span)
    assert found["rpc.response.status_code"] == code
    assert found["rpc.grpc.status_code"] == number
    assert (span.status.code == trace_pb2.Status.STATUS_CODE_ERROR) is is_error
    assert ("error.type" in found) is is_error
    assert [attributes(event)["exception.type"] for event in span.events] == exceptions


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_handler_works_and_is_recorded_once(
    telemetry: Telemetry, collector: Collector, kind: str
) -> None:
    async with serving(
        handlers=[arities(nothing)], interceptors=interceptors(telemetry)
    ) as running:
        answers = await call_kind(running.channel, kind)
    telemetry.shutdown()
    assert answers[-1] == b"done"
    assert attributes(collector.span(f"{SERVICE}/{kind}"))["rpc.response.status_code"] == "OK"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_is_an_error_of_ours_whatever_the_handler(
    telemetry: Telemetry, collector: Collector, kind: str
) -> None:
    begun = asyncio.Event()

    async def begin(context: Any) -> None:
        begun.set()
        await forever(context)

    async with serving(handlers=[arities(begin)], interceptors=interceptors(telemetry)) as running:
        await outlast(lambda seconds: call_kind(running.channel, kind, timeout=seconds), begun)
    telemetry.shutdown()
    # More than one on a busy machine, where the first may be over before its handler begins.
    spans = [span for span in collector.spans if span.name == f"{SERVICE}/{kind}"]
    assert spans
    for span in spans:
        assert attributes(span)["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
        assert span.status.code == trace_pb2.Status.STATUS_CODE_ERROR


async def test_a_deadline_that_is_rounded_on_its_way_is_still_one(
    telemetry: Telemetry, collector: Collector
) -> None:
    """1.234 s arrive as 1.24: the client's cancel comes first, and is known for what it is."""
    await call_info(telemetry, forever, timeout=1.234)
    telemetry.shutdown()
    found = attributes(collector.span(INFO))
    assert found["rpc.response.status_code"] == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("deadline", [None, 60.0])
async def test_a_stream_that_its_client_cancels_is_recorded_and_is_no_error(
    telemetry: Telemetry, collector: Collector, deadline: float | None
) -> None:
    servicer = Scripted(forever)
    async with serving(servicer=servicer, interceptors=interceptors(telemetry)) as running:
        stream = running.stub.Generate(pb.GenerateRequest(text="x"), timeout=deadline)
        await stream.read()
        stream.cancel()
        await asyncio.wait_for(servicer.ended.wait(), 60)
    telemetry.shutdown()
    span = collector.span(GENERATE)
    assert attributes(span)["rpc.response.status_code"] == "CANCELLED"
    assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert not span.events
    ((found, point),) = collector.points("rpc.server.call.duration")
    assert found["rpc.response.status_code"] == "CANCELLED"
    assert point.count == 1


async def test_probes_and_reflection_pass_untraced_and_watch_works(
    telemetry: Telemetry, collector: Collector
) -> None:
    board = HealthBoard()

    async def prepare(server: grpc.aio.Server) -> None:
        await board.add_to(server, ())
        enable_reflection(TABLE, server)

    async with serving(prepare=prepare, interceptors=interceptors(telemetry)) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        request = health_pb2.HealthCheckRequest(service="liveness")
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    telemetry.shutdown()
    assert collector.spans == []


async def test_a_span_says_what_the_instrumentations_interceptor_would_say(
    telemetry: Telemetry, collector: Collector
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    both = [aio_server_interceptor(provider), *interceptors(telemetry)]
    async with serving(servicer=Scripted(), interceptors=both) as running:
        await running.stub.Info(pb.InfoRequest())
    telemetry.shutdown()
    (theirs,) = exporter.get_finished_spans()
    ours = attributes(collector.span(INFO))
    assert theirs.attributes is not None
    # The new conventions have the full name in the place of the short one.
    wanted = {**theirs.attributes, "rpc.method": INFO}
    assert {name: ours.get(name) for name in wanted} == wanted
    assert (theirs.name.lstrip("/"), theirs.kind) == (INFO, SpanKind.SERVER)


@pytest.mark.filterwarnings("ignore:coroutine 'HealthServicer.Watch' was never awaited")
async def test_the_instrumentations_interceptor_still_has_the_faults_that_ours_avoids() -> None:
    """When this fails, an update has fixed them: much of tracing.py can go."""
    board, exporter = HealthBoard(), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    contrib = aio_server_interceptor(provider)

    async def prepare(server: grpc.aio.Server) -> None:
        await board.add_to(server, ())

    servicer = Scripted(forever)
    async with serving(servicer=servicer, prepare=prepare, interceptors=[contrib]) as running:
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await watch.read()
        exporter.clear()
        stream = running.stub.Generate(pb.GenerateRequest(text="x"))
        await stream.read()
        stream.cancel()
        await asyncio.wait_for(servicer.ended.wait(), 60)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["rpc.grpc.status_code"] == 0, "a cancelled call looks like a good one"


# -- generations -------------------------------------------------------------------------------


def sample(index: int, generated: int, first: int, last: int, reason: FinishCode | None) -> Sample:
    """A sample that has lived; no text is looked at here."""
    made = Sample(
        index=index,
        sequence_id=index,
        reader=None,
        streamed=True,
    )
    made.generated, made.first_token_at, made.last_token_at = generated, first, last
    made.ending = Ending(reason) if reason else None
    return made


def generation(arrived: int, samples: list[Sample], began: int | None) -> Generation:
    request = Request(
        sequence_ids=[one.sequence_id for one in samples],
        prompt=[7] * 20,
        sampling=SamplingParams(do_sample=True, temperature=0.5, seed=2**64 - 1),
        stopping=StoppingParams(max_new_tokens=32),
        arrived_at=arrived,
    )
    made = Generation(
        request,
        samples,
        None,  # type: ignore[arg-type]
        streamed=True,
    )
    if began is not None:
        made.started = Started(0, cached_tokens=12, began_at=began)
    return made


Leave = Literal["never", "while it waits", "while it writes"]


async def generate(
    telemetry: Telemetry,
    made: Generation,
    leave: Leave = "never",
    *,
    adapts: bool = False,
    **named: str,
) -> None:
    """A Generate call that reports `made` when it ends, as GenerateService does.

    Args:
        leave: when the client goes away: the handler is then at an await, or at a yield.
        adapts: it names an adapter.
        named: what else is said of it.
    """

    class Generating(Scripted):
        async def Generate(self, request: Any, context: Any) -> Any:
            recorded = current_call()
            assert recorded is not None
            if adapts:
                recorded.adapts("sql")
            try:
                yield pb.GenerateResponse()
                if leave == "while it waits":
                    await forever(context)
                while leave == "while it writes":
                    yield pb.GenerateResponse(tokens=pb.TokenDelta(text="x" * 100_000))
            finally:
                recorded.named("r-1", {})
                recorded.generated(made, model_id="demo", **named)
                self.ended.set()

    servicer = Generating()
    async with serving(servicer=servicer, interceptors=interceptors(telemetry)) as running:
        stream = running.stub.Generate(pb.GenerateRequest(text="secret prompt"))
        await stream.read()
        if leave != "never":
            # Long enough for the flow-control window to fill.
            await asyncio.sleep(0.1)
            stream.cancel()
            await asyncio.wait_for(servicer.ended.wait(), 60)
        else:
            assert await stream.read() is grpc.aio.EOF


async def test_a_generation_has_its_phases_as_children(
    telemetry: Telemetry, collector: Collector
) -> None:
    arrived = time.monotonic_ns()
    offset = time.time_ns() - time.monotonic_ns()
    first, last = arrived + 50 * MS, arrived + 350 * MS
    made = generation(arrived, [sample(0, 31, first, last, FinishCode.EOS)], arrived + 10 * MS)
    await generate(telemetry, made)
    telemetry.shutdown()
    parent = collector.span(GENERATE)
    phases = {"queue": (0, 10), "prefill": (10, 50), "decode": (50, 350)}
    for name, (begin, end) in phases.items():
        span = collector.span(name)
        assert span.parent_span_id == parent.span_id
        assert span.trace_id == parent.trace_id
        assert span.end_time_unix_nano - span.start_time_unix_nano == (end - begin) * MS
        # The two clocks are read one after the other, here and there.
        assert abs(span.start_time_unix_nano - offset - arrived - begin * MS) < 1000 * MS


async def test_a_generation_is_described_without_its_text(
    telemetry: Telemetry, collector: Collector
) -> None:
    now = time.monotonic_ns()
    samples = [
        sample(0, 31, now + 5, now + 9, FinishCode.EOS),
        sample(1, 32, now + 5, now + 9, FinishCode.LENGTH),
    ]
    await generate(telemetry, generation(now, samples, now + 1))
    telemetry.shutdown()
    found = attributes(collector.span(GENERATE))
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tokenpod",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 32,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 63,
        "gen_ai.usage.cache_read.input_tokens": 12,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert "secret" not in str(collector.spans)


async def test_a_generation_is_measured(telemetry: Telemetry, collector: Collector) -> None:
    now = time.monotonic_ns()
    first, last = now + 50 * MS, now + 350 * MS
    made = generation(now, [sample(0, 31, first, last, FinishCode.EOS)], now + 10 * MS)
    await generate(telemetry, made)
    telemetry.shutdown()
    common = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tokenpod",
        "gen_ai.request.model": "demo",
    }
    ((found, point),) = collector.points("gen_ai.server.time_to_first_token")
    assert found == common
    assert point.sum == pytest.approx(0.05)
    assert point.explicit_bounds[0] == 0.001
    ((found, point),) = collector.points("gen_ai.server.time_per_output_token")
    assert point.sum == pytest.approx(0.01)
    ((found, point),) = collector.points("gen_ai.server.request.duration")
    assert found == common
    assert point.explicit_bounds[-1] == pytest.approx(81.92)
    (example,) = point.exemplars
    assert example.trace_id == collector.span(GENERATE).trace_id
    usage = {
        found["gen_ai.token.type"]: point.sum
        for found, point in collector.points("gen_ai.client.token.usage")
    }
    assert usage == {"input": 20, "output": 31}
    ((found, point),) = collector.points("rpc.server.call.duration")
    assert found["rpc.method"] == GENERATE
    assert point.explicit_bounds[-1] == 600


@pytest.mark.parametrize("leave", ["while it waits", "while it writes"])
async def test_a_cancelled_generation_is_told_too(
    telemetry: Telemetry, collector: Collector, leave: Leave
) -> None:
    now = time.monotonic_ns()
    made = generation(now, [sample(0, 5, now + 2, now + 9, None)], now + 1)
    await generate(telemetry, made, leave)
    telemetry.shutdown()
    found = attributes(collector.span(GENERATE))
    assert found["rpc.response.status_code"] == "CANCELLED"
    assert found["gen_ai.usage.output_tokens"] == 5
    assert "gen_ai.response.finish_reasons" not in found
    ((found, _),) = collector.points("gen_ai.server.request.duration")
    assert found["error.type"] == "CANCELLED"
    assert "gen_ai.server.time_per_output_token" not in collector.metrics


async def test_a_generation_that_never_left_the_queue_has_only_that_phase(
    telemetry: Telemetry, collector: Collector
) -> None:
    made = generation(time.monotonic_ns(), [sample(0, 0, 0, 0, None)], None)
    await generate(telemetry, made)
    telemetry.shutdown()
    assert sorted(span.name for span in collector.spans) == [GENERATE, "queue"]
    assert "gen_ai.server.time_to_first_token" not in collector.metrics


async def test_adapters_and_quantisation_are_named(
    telemetry: Telemetry, collector: Collector
) -> None:
    now = time.monotonic_ns()
    made = generation(now, [sample(0, 5, now + 2, now + 9, None)], now + 1)
    await generate(telemetry, made, adapter="sql", quantization="compressed-tensors int4")
    await generate(telemetry, made, adapter="", quantization="")
    telemetry.shutdown()
    found = [point for point, _ in collector.points("gen_ai.server.request.duration")]
    named = ("tokenpod.adapter", "tokenpod.quantization")
    said = {tuple(each.get(name) for name in named) for each in found}
    assert said == {("sql", "compressed-tensors int4"), (None, None)}
    spans = [attributes(span) for span in collector.spans if span.name == GENERATE]
    assert {tuple(each.get(name) for name in named) for each in spans} == said


@pytest.mark.parametrize(
    ("act", "reason"),
    [(full, "max_queue_tokens"), (draining, "draining"), (nan, "not_a_number"), (bug, "internal")],
)
async def test_refusals_and_failures_are_counted_by_reason(
    telemetry: Telemetry, collector: Collector, act: Any, reason: str
) -> None:
    await call_info(telemetry, act)
    telemetry.shutdown()
    ((found, point),) = collector.points("tokenpod.calls.failed")
    assert (found["tokenpod.reason"], found["tokenpod.phase"]) == (reason, "admission")
    assert found["rpc.method"] == INFO
    assert point.as_int == 1


@pytest.mark.parametrize(
    ("began", "first", "phase"), [(None, 0, "queue"), (1, 0, "prefill"), (1, 2, "decode")]
)
async def test_cancellations_are_counted_by_phase(
    telemetry: Telemetry, collector: Collector, began: int | None, first: int, phase: str
) -> None:
    now = time.monotonic_ns()
    came = now + first if first else 0
    made = generation(
        now, [sample(0, 3 if first else 0, came, came, None)], None if began is None else now + 1
    )
    await generate(telemetry, made, "while it waits")
    telemetry.shutdown()
    ((found, _),) = collector.points("tokenpod.calls.failed")
    assert (found["tokenpod.reason"], found["tokenpod.phase"]) == ("cancelled", phase)


# -- load and the end --------------------------------------------------------------------------


def test_the_engines_load_is_observed(telemetry: Telemetry, collector: Collector) -> None:
    telemetry.watch(
        lambda: Load(
            3, 5, 90, slots=100, free_slots=40, evictable_slots=20, preemptions=7, adapters=2
        )
    )
    telemetry.shutdown()
    found = {
        name: collector.points(name)[0][1]
        for name in ("tokenpod.queue.requests", "tokenpod.requests.running")
    }
    assert found["tokenpod.queue.requests"].as_int == 5
    assert found["tokenpod.requests.running"].as_int == 3
    assert collector.points("tokenpod.kv.utilization")[0][1].as_double == pytest.approx(0.4)
    assert collector.points("tokenpod.adapters.running")[0][1].as_int == 2
    assert collector.points("tokenpod.preemptions")[0][1].as_int == 7


def test_what_constraints_cost_is_observed(telemetry: Telemetry, collector: Collector) -> None:
    masks = MaskCounts(900, 4, 30_000_000, cached=8, compiled=5, refused=2)
    telemetry.watch(lambda: Load(0, 0, 0, slots=1, free_slots=1, evictable_slots=0, masks=masks))
    telemetry.shutdown()
    names = "masks", "masks.late", "masks.time", "compiled", "cached", "refused"
    points = [collector.points(f"tokenpod.constraints.{name}")[0][1] for name in names]
    found = [point.as_int or point.as_double for point in points]
    assert found == [900, 4, pytest.approx(0.03), 5, 8, 2]


def test_drafts_prefixes_ends_and_the_hosts_memory_are_observed(
    telemetry: Telemetry, collector: Collector
) -> None:
    load = Load(
        *(0, 0, 0, 1, 1, 0),
        prompt_tokens=50,
        cached_tokens=20,
        evicted_tokens=7,
        swapped=3,
        swapped_tokens=40,
        ended=Ended(stopped=5, length=4, aborted=2, ignored=1),
        drafted_at=[30, 20],
        accepted_at=[15, 6],
        fetched_tokens=31,
        offload_slots=200,
        offload_used_slots=50,
    )
    telemetry.watch(lambda: load)
    telemetry.shutdown()

    def by(name: str, attribute: str) -> dict[Any, int]:
        return {about[attribute]: point.as_int for about, point in collector.points(name)}

    assert by("tokenpod.draft.tokens", "tokenpod.draft.position") == {1: 30, 2: 20}
    assert by("tokenpod.draft.accepted_tokens", "tokenpod.draft.position") == {1: 15, 2: 6}
    cache = {"cached": 20, "computed": 30, "evicted": 7}
    assert by("tokenpod.prefix.tokens", "tokenpod.prefix") == cache
    ends = {"stopped": 5, "length": 4, "aborted": 2, "ignored": 1}
    assert by("tokenpod.requests.ended", "tokenpod.end") == ends
    names = "requests.swapped", "swapped_tokens", "fetched_tokens"
    points = [collector.points(f"tokenpod.{name}")[0][1].as_int for name in names]
    assert points == [3, 40, 31]
    assert collector.points("tokenpod.host_kv.utilization")[0][1].as_double == 0.25


async def test_the_page_names_every_metric_and_no_other(
    telemetry: Telemetry, collector: Collector
) -> None:
    telemetry.watch(lambda: Load(0, 0, 0, 1, 1, 0, drafted_at=[1], accepted_at=[1]))
    telemetry.watch_pod(lambda: PodReadings(2.0, True, False, 0, 0, 0, 1.0))
    now = time.monotonic_ns()
    made = generation(now, [sample(0, 5, now + 2, now + 9, None)], now + 1)
    stop = telemetry.watch_loop()
    await generate(telemetry, made, "while it waits", adapts=True)
    await asyncio.sleep(0.3)
    stop()
    telemetry.shutdown()
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(tokenpod\.[a-z_.]+)`", row)}
    assert named == {name for name in collector.metrics if name.startswith("tokenpod.")}


async def test_a_collector_that_is_gone_costs_calls_nothing_the_end_little_and_a_line(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ServerSettings(otlp_endpoint="http://127.0.0.1:1")
    for _ in range(2):
        telemetry = telemetry_of(settings)
        async with serving(servicer=Scripted(), interceptors=interceptors(telemetry)) as running:
            assert (await running.stub.Info(pb.InfoRequest())).dtype == "float32"
        # The SDK alone would retry for longer than that.
        await asyncio.wait_for(asyncio.to_thread(telemetry.shutdown), 30)
    # Senders of other tests may still be at it.
    messages = [message for message in caplog.messages if " to 127.0.0.1:1," in message]
    lines = [message.partition(", error code")[0] for message in messages]
    # Each once; of what an end interrupts while it is tried again nothing is said.
    assert lines
    assert len(set(lines)) == len(lines)
    assert set(lines) <= {f"Failed to export {of} to 127.0.0.1:1" for of in ("metrics", "traces")}
    caplog.set_level("INFO")
    telemetry = telemetry_of(ServerSettings(otlp_endpoint=collector.endpoint))
    async with serving(servicer=Scripted(), interceptors=interceptors(telemetry)) as running:
        await running.stub.Info(pb.InfoRequest())
    await asyncio.to_thread(telemetry.shutdown)
    gone = {line.split()[3] for line in lines}
    again = [message for message in caplog.messages if message.endswith("again")]
    assert len(again) == len(set(again))
    assert {f"the collector takes {of} again" for of in gone} <= set(again)


async def test_a_collector_that_never_answers_costs_calls_nothing_and_the_end_little() -> None:
    """It takes the connection and what is sent, and says nothing: worse than being gone."""
    taken: list[asyncio.StreamWriter] = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        while await reader.read(65536):
            pass

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        telemetry = telemetry_of(ServerSettings(otlp_endpoint=f"http://127.0.0.1:{port}"))
        async with serving(servicer=Scripted(), interceptors=interceptors(telemetry)) as running:
            assert (await running.stub.Info(pb.InfoRequest())).dtype == "float32"
        await asyncio.wait_for(asyncio.to_thread(telemetry.shutdown), 30)
        assert taken, "nobody tried to send"
        for writer in taken:
            writer.close()
