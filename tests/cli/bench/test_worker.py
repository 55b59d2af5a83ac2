"""One process' requests, against a small real server whose answers are chosen."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest

from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.bench.messages import Begin, Level, Load, Plan
from tokenpod_client.cli.bench.prompts import Prompts, Text, Uniform
from tokenpod_client.cli.bench.worker import LevelRun, make_request
from tokenpod_client.cli.connection import Remote
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.generate.v3.generate_pb2_grpc import (
    TextGenerationServiceServicer,
    TextGenerationServiceStub,
    add_TextGenerationServiceServicer_to_server,
)


@dataclass
class Canned(TextGenerationServiceServicer):
    """Answers by the prompt's text; counts how many calls it had at once."""

    address: str = ""
    requests: list = field(default_factory=list)
    metadata: list = field(default_factory=list)
    running: int = 0
    most: int = 0
    #: Nobody is answered before so many calls run at once.
    waits_for: int = 0
    together: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if request.text == "full":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
            yield v3.GenerateResponse(started=v3.Started(prompt_tokens=7, cached_tokens=3))
            if request.text == "slow":
                await asyncio.sleep(60)
            if self.most >= self.waits_for:
                self.together.set()
            await self.together.wait()
            for sample in range(max(request.sampling.n, 1)):
                for ids in ([1], [2, 3], []):
                    delta = v3.TokenDelta(index=sample, text="x", token_ids=ids)
                    yield v3.GenerateResponse(tokens=delta)
                    # Others run meanwhile, so that what runs at once is seen at once.
                    await asyncio.sleep(0.002)
                if request.text != "half":
                    timings = v3.Timings(queue_ns=5_000_000, time_to_first_token_ns=7_000_000)
                    yield v3.GenerateResponse(finished=v3.Finished(index=sample, timings=timings))
        finally:
            self.running -= 1


@pytest.fixture
async def server() -> AsyncIterator[Canned]:
    canned = Canned()
    aio = grpc.aio.server()
    add_TextGenerationServiceServicer_to_server(canned, aio)
    canned.address = f"127.0.0.1:{aio.add_insecure_port('127.0.0.1:0')}"
    await aio.start()
    yield canned
    await aio.stop(0)


def plan_of(remotes=(), *, texts=(), ignore_eos=True, **options):
    prompts = Prompts(Uniform(3, 3), Uniform(5, 5), (10, 20), texts=texts)
    return Plan(list(remotes), BenchOptions(**options), prompts, 1, ignore_eos, [], {})


async def run(server, load, requests, *, texts=("hi",), own=None, duration=None, **options):
    """The records of a level, in the order of their ends."""
    options = {"deadline": 30.0} | options
    plan = plan_of(
        [Remote(address=server.address, token="s")], texts=tuple(map(Text, texts)), **options
    )
    first, step = own or (0, 1)
    begin = Begin(Level(1, load, requests, duration), first, step, load.concurrency)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stubs = [[TextGenerationServiceStub(channel)]]
        outcome = await LevelRun(plan, begin, stubs).run(time.monotonic(), lambda progress: None)
    return outcome.records


async def test_a_record_holds_what_the_stream_told(server):
    (record,) = await run(server, Load("closed", 1), 1)
    assert (record.code, record.detail, record.ok) == ("OK", "", True)
    assert (record.prompt_tokens, record.cached_tokens) == (7, 3)
    assert (record.queue_s, record.first_token_s) == (0.005, 0.007)
    times = record.arrivals["time"]
    assert record.arrivals["tokens"].tolist() == [1, 2]
    assert 0 <= record.due <= record.sent <= times[0] <= times[1] <= record.ended
    assert server.metadata[0]["authorization"] == "Bearer s"


async def test_samples_are_told_apart(server):
    (record,) = await run(server, Load("closed", 1), 1, n=3)
    assert record.arrivals["sample"].tolist() == [0, 0, 1, 1, 2, 2]
    assert record.output_tokens == 9
    assert len(record.itl) == 3


async def test_a_refusal_is_a_record_with_its_code(server):
    bad, good = await run(server, Load("closed", 1), 2, texts=("full", "hi"))
    assert (bad.code, bad.detail, bad.ok) == ("RESOURCE_EXHAUSTED", "the queue is full", False)
    assert good.ok


async def test_a_deadline_ends_a_request_and_keeps_what_it_was_told(server):
    (record,) = await run(server, Load("closed", 1), 1, texts=("slow",), deadline=0.3)
    assert (record.code, record.prompt_tokens) == ("DEADLINE_EXCEEDED", 7)


async def test_a_stream_that_ends_well_without_its_last_event_is_no_success(server):
    (record,) = await run(server, Load("closed", 1), 1, texts=("half",))
    assert record.code == "UNFINISHED"


async def test_a_closed_loop_keeps_its_number_of_requests_in_flight(server):
    records = await run(server, Load("closed", 3), 12)
    assert sorted(record.index for record in records) == list(range(12))
    assert server.most == 3
    assert all(record.due <= record.sent for record in records)


async def test_all_at_once_waits_for_nobody(server):
    server.waits_for = 8
    await run(server, Load("open", None, None, 1.0), 8)
    assert server.most == 8


async def test_a_capped_request_waits_from_when_it_was_due(server):
    records = await run(server, Load("open", 1, None, 1.0), 3)
    assert server.most == 1
    assert [record.due for record in records] == [0.0, 0.0, 0.0]
    # It was sent only when the one before had ended, and that wait is in its latency.
    for before, after in itertools.pairwise(records):
        assert after.sent >= before.ended
        assert after.ttft > after.sent


async def test_requests_of_an_open_loop_are_never_early(server):
    records = await run(server, Load("open", None, 200.0, 1.0), 10)
    assert all(record.sent >= record.due > 0 for record in records)


async def test_time_ends_a_level_of_any_number_of_requests(server):
    for load in (Load("closed", 2), Load("open", None, 100.0, 1.0)):
        records = await run(server, load, None, duration=0.2)
        assert records
        assert all(record.due < 0.2 for record in records)
        assert all(record.ok for record in records)


async def test_a_process_sends_its_share_when_the_whole_says(server):
    all_of_them = await run(server, Load("open", None, 200.0, 1.0), 9)
    own = await run(server, Load("open", None, 200.0, 1.0), 9, own=(1, 3))
    due = {record.index: record.due for record in all_of_them}
    assert {record.index: record.due for record in own} == {i: due[i] for i in (1, 4, 7)}


async def test_requests_take_turns_at_servers_and_connections(server):
    plan = plan_of([Remote(address="a"), Remote(address="b")])
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = TextGenerationServiceStub(channel)
        calls = []

        class Noting:
            def __init__(self, name):
                self.name = name

            def Generate(self, *arguments, **keywords):
                calls.append(self.name)
                return stub.Generate(*arguments, **keywords)

        stubs = [[Noting("a0"), Noting("a1")], [Noting("b0"), Noting("b1")]]
        begin = Begin(Level(1, Load("closed", 1), 6), slots=1)
        outcome = await LevelRun(plan, begin, stubs).run(time.monotonic(), lambda progress: None)
    assert calls == ["a0", "b0", "a1", "b1", "a0", "b0"]
    assert [record.target for record in outcome.records] == [0, 1] * 3


def test_a_request_asks_for_what_was_drawn():
    sent = make_request(plan_of(temperature=0.5, top_p=0.25, n=2), 1, 4)
    assert len(sent.token_ids.ids) == 3
    del sent.token_ids.ids[:]
    assert sent == v3.GenerateRequest(
        token_ids=v3.TokenIds(),
        sampling=v3.SamplingOptions(temperature=0.5, top_p=0.25, n=2, seed=4),
        stopping=v3.StoppingOptions(max_new_tokens=5, ignore_eos=True),
    )


def test_a_request_leaves_unset_what_is_not_given():
    sent = make_request(plan_of(texts=(Text("hi"),), ignore_eos=False), 1, 0)
    assert sent.text == "hi"
    assert not sent.sampling.HasField("temperature")
    assert not sent.stopping.ignore_eos


def test_a_chat_is_sent_as_one():
    sent = make_request(plan_of(texts=(Text(messages=[("user", "hi")]),)), 1, 0)
    assert [(m.role, m.content) for m in sent.chat.messages] == [("user", "hi")]
