"""Several front ends on one port: clients see one server, whichever process they reach."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2 as engine
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from support.clients.public_api import collect, generate, text_request, until_refused
from support.pods.harness import (
    NOT_SERVING,
    SERVING,
    ServerProcess,
    children_of,
    free_port,
    serve,
)
from support.waiting import wait_for
from tokenpod_client.protos.fmaas import generation_pb2 as tgis
from tokenpod_client.protos.fmaas.generation_pb2_grpc import GenerationServiceStub as TgisStub
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as public
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

FRONT_ENDS = 3
#: Of each front end, unless told otherwise.
TEXT_WORKERS = 2
#: The model's name for clients of the pod.
SERVED = "acme/small"
PROMPT = "import os\n"
SHORT = {"max_new_tokens": 5, "ignore_eos": True}
LONG = {"max_new_tokens": 1900, "ignore_eos": True}
#: Of the pod that wants a token; the others pay no attention to it.
KNOWN = (("authorization", "Bearer open-sesame"),)
TGIS_PORT = free_port()


def connected(server: ServerProcess) -> dict[int, set[int]]:
    """Front end's process id -> remote ports of the public port's connections that it has."""
    mine = f":{server.port:04X}"
    remote_of = {}
    tables = [Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6")]
    for line in "".join(tables).splitlines():
        _, local, remote, state, *rest = line.split()
        if local.endswith(mine) and state == "01":
            remote_of[f"socket:[{rest[5]}]"] = int(remote.rpartition(":")[2], 16)
    found: dict[int, set[int]] = {}
    for pid in (server.process.pid, *server.front_end_pids()):
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        found[pid] = {remote_of[link] for link in links if link in remote_of}
    return found


class Client:
    """A connection of its own, and the front end that it reached."""

    def __init__(self, server: ServerProcess) -> None:
        before = connected(server)
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(server.address, options=options)
        server.channels.append(self.channel)
        grpc.channel_ready_future(self.channel).result(20)
        self.stub: Any = GenerationServiceStub(self.channel)
        self.shard: Any = rpc.TextGenerationServiceStub(self.channel)
        self.front_end = self._found(server, before)

    def _found(self, server: ServerProcess, before: dict[int, set[int]]) -> int:
        for _ in range(200):
            for pid, ports in connected(server).items():
                if ports - before[pid]:
                    return pid
            time.sleep(0.01)
        raise AssertionError("nobody has the connection")

    def long(self) -> Stream:
        return Stream(self)


class Stream:
    """A long `Generate` call that has begun."""

    def __init__(self, client: Client, **stopping: Any) -> None:
        request = text_request(PROMPT, stopping={**LONG, **stopping})
        self.call = client.stub.Generate(request, timeout=120, metadata=KNOWN)
        self.events = [next(self.call), next(self.call)]

    def rest(self) -> list[Any]:
        self.events += self.call
        return self.events

    def code(self) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as ended:
            self.rest()
        return ended.value.code()


def one_each(server: ServerProcess) -> list[Client]:
    """A client of every front end, the first one's first."""
    found: dict[int, Client] = {}
    for _ in range(100):
        client = Client(server)
        found.setdefault(client.front_end, client)
        if len(found) == FRONT_ENDS:
            return [found[pid] for pid in (server.process.pid, *server.front_end_pids())]
    raise AssertionError(f"100 connections reached {len(found)} front ends")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def pod() -> Iterator[ServerProcess]:
    flags = ("--front-ends", str(FRONT_ENDS), "--max-concurrent-requests", "6")
    with serve(*flags, "--kv-cache-events", "--served-model-name", SERVED) as server:
        yield server


@pytest.fixture(scope="module")
def clients(pod: ServerProcess) -> list[Client]:
    return one_each(pod)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A pod that wants a token; the last test that takes it drains it."""
    tokens = tmp_path_factory.mktemp("guarded") / "tokens"
    tokens.write_text("open-sesame\n")
    flags = ("--front-ends", str(FRONT_ENDS), "--auth-token-file", str(tokens))
    with serve(*flags, "--tgis-port", str(TGIS_PORT)) as server:
        yield server


def test_every_front_end_streams_the_same(clients: list[Client]) -> None:
    request = text_request(PROMPT, stopping=LONG | {"max_new_tokens": 40})
    texts = {generate(client.stub, request).samples[0].text for client in clients}
    assert len(texts) == 1


def test_calls_at_once_on_all_front_ends_do_not_mix(clients: list[Client]) -> None:
    asked = [("def f(x):\n", 30), ("import sys\n", 50), ("class A:\n", 40)]
    requests = [
        text_request(text, stopping=LONG | {"max_new_tokens": tokens}) for text, tokens in asked
    ]
    alone = [generate(clients[0].stub, request).samples[0].text for request in requests]
    calls = [
        client.stub.Generate(request, timeout=60)
        for client, request in zip(clients, requests, strict=True)
    ]
    assert [collect(list(call), 1).samples[0].text for call in calls] == alone


def batch(batch_id: int, request_id: int) -> pb.Batch:
    made = pb.Request(
        id=request_id,
        inputs=PROMPT,
        truncate=100,
        parameters=pb.NextTokenChooserParameters(temperature=1.0, repetition_penalty=1.0),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=9),
    )
    made.input_chunks.chunks.add(text=PROMPT)
    return pb.Batch(id=batch_id, requests=[made], size=1, max_tokens=100)


def test_a_routers_batch_is_the_pods_whichever_front_end_its_next_call_reaches(
    clients: list[Client],
) -> None:
    prefilled = clients[1].shard.Prefill(pb.PrefillRequest(batch=batch(1, 11)))
    assert prefilled.batch.request_ids == [11]
    for client in (clients[2], clients[0], clients[1]):
        decoded = client.shard.Decode(pb.DecodeRequest(batches=[prefilled.batch]))
        assert [made.request_id for made in decoded.generations] == [11]
    clients[2].shard.ClearCache(pb.ClearCacheRequest())
    for client in clients:
        with pytest.raises(grpc.RpcError) as unknown:
            client.shard.Decode(pb.DecodeRequest(batches=[prefilled.batch]))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_relayed_error_has_all_of_its_details(clients: list[Client]) -> None:
    errors = []
    for client in clients:
        with pytest.raises(grpc.RpcError) as unknown:
            client.shard.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=404)]))
        status = rpc_status.from_call(unknown.value)
        assert status is not None
        errors.append((unknown.value.code(), status.message, str(status.details)))
    assert len(set(errors)) == 1


def test_an_undecodable_call_is_the_clients_fault_on_every_front_end(clients: list[Client]) -> None:
    for client in clients:
        method = "/generate.v3.TextGenerationService/Decode"
        with pytest.raises(grpc.RpcError) as refused:
            client.channel.unary_unary(method)(b"\xff\xff", timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as unknown:
            client.channel.unary_unary(f"{method}r")(b"", timeout=10)
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_model_is_named_and_health_told_on_every_front_end(clients: list[Client]) -> None:
    for client in clients:
        answer, call = client.shard.Info.with_call(pb.InfoRequest(), timeout=10)
        assert answer.device_type == "cpu"
        assert dict(call.initial_metadata())["tokenpod-model-id"] == SERVED
        first = generate(client.stub, text_request(PROMPT, stopping=SHORT)).started
        assert first.model == SERVED
        api = GenerationServiceStub(client.channel)
        assert api.GetModel(service.GetModelRequest(), timeout=10).model.name == SERVED
        request = public.GenerateRequest(text=PROMPT, model="demo")
        with pytest.raises(grpc.RpcError) as unknown:
            list(api.Generate(request, timeout=10))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert repr(SERVED) in unknown.value.details()
        health = health_pb2_grpc.HealthStub(client.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)
        assert next(watch).status == SERVING
        watch.cancel()


def test_the_names_and_the_load_of_calls_are_the_pods(clients: list[Client]) -> None:
    apis = [GenerationServiceStub(client.channel) for client in clients]
    request = public.GenerateRequest(text=PROMPT, stopping=LONG, request_id="twin")
    running = apis[1].Generate(request, timeout=120)
    assert next(running).started.request_id == "twin"
    for api in apis:
        with pytest.raises(grpc.RpcError) as taken:
            list(api.Generate(request, timeout=60))
        assert taken.value.code() is grpc.StatusCode.ALREADY_EXISTS
        load = api.GetLoad(service.GetLoadRequest(), timeout=60)
        assert load.request_count == load.running_sequence_count == 1
        assert load.prompt_token_count > 0
    running.cancel()

    def given_back() -> bool:
        call = apis[2].Generate(request, timeout=60)
        try:
            return bool(next(call).started.request_id)
        except grpc.RpcError:
            return False
        finally:
            call.cancel()

    wait_for(given_back)


def test_the_queue_is_the_pods(pod: ServerProcess, clients: list[Client]) -> None:
    running = [client.long() for client in clients for _ in range(2)]
    for client in clients:
        with pytest.raises(grpc.RpcError) as full:
            generate(client.stub, text_request(PROMPT, stopping=SHORT))
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "6 requests" in full.value.details()
    for stream in running:
        stream.call.cancel()

    def free_again() -> bool:
        try:
            return bool(generate(clients[2].stub, text_request(PROMPT, stopping=SHORT)).samples)
        except grpc.RpcError:
            return False

    wait_for(free_again)


def test_a_stuck_engine_is_seen_though_only_a_further_front_end_waits(
    pod: ServerProcess, clients: list[Client]
) -> None:
    engine = pod.engine_pid()
    stream = clients[1].long()
    time.sleep(0.6)  # The front ends tell each other four times a second.
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_for(lambda: pod.health() == NOT_SERVING)
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_for(lambda: pod.health() == SERVING)
    stream.call.cancel()


def test_a_call_is_ended_by_its_name_from_every_front_end(clients: list[Client]) -> None:
    """Gateways abort on whichever connection they have, and do not cancel."""
    for turn, client in enumerate(clients):
        stub = VllmEngineStub(client.channel)
        name = f"call-{turn}"
        call = stub.Generate(
            engine.GenerateRequest(
                request_id=name,
                text=PROMPT,
                stream=True,
                sampling_params={"max_tokens": 1900, "ignore_eos": True},
            ),
            timeout=120,
        )
        next(call)
        other = VllmEngineStub(clients[(turn + 1) % len(clients)].channel)
        other.Abort(engine.AbortRequest(request_ids=[name]), timeout=120)
        *_, last = call
        assert last.complete.finish_reason == "abort"
        assert last.complete.completion_tokens < 1900


def test_constraints_are_kept_on_every_front_end(clients: list[Client]) -> None:
    for client in clients:
        api = GenerationServiceStub(client.channel)
        request = public.GenerateRequest(
            text=PROMPT, constraint={"regex": "[ab]{3}"}, stopping={"max_new_tokens": 9}
        )
        (result,) = api.GenerateOnce(
            service.GenerateOnceRequest(request=request), timeout=120
        ).results
        assert set(result.text) <= {"a", "b"}
        assert len(result.text) == 3
        assert result.constraint_satisfied


def test_cache_events_come_on_every_front_end(clients: list[Client]) -> None:
    for client in clients:
        stub = VllmEngineStub(client.channel)
        call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=120)
        assert next(call).events[0].WhichOneof("data") == "cleared"
        call.cancel()


def test_a_second_port_has_every_protocol_and_asks_for_the_token_too(
    guarded: ServerProcess,
) -> None:
    """Each front end listens there: whichever a connection reaches, it is answered."""
    request = tgis.SingleGenerationRequest(request={"text": PROMPT})
    asked = service.GetModelRequest()
    for _ in range(2 * FRONT_ENDS):
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{TGIS_PORT}", options=options) as channel:
            stub, api = TgisStub(channel), GenerationServiceStub(channel)
            answers = list(stub.GenerateStream(request, metadata=KNOWN, timeout=120))
            assert answers[-1].generated_token_count == 20
            assert api.GetModel(asked, metadata=KNOWN, timeout=120).model.name == "demo"
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfo(tgis.ModelInfoRequest(), timeout=120)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_nobody_hears_of_others_prompts_unless_the_operator_says_so(
    guarded: ServerProcess,
) -> None:
    stub, known = VllmEngineStub(guarded.channel()), {"metadata": KNOWN, "timeout": 120}
    for call in (
        lambda: list(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), **known)),
        lambda: stub.FlushCache(common.FlushCacheRequest(), **known),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--kv-cache-events" in caught.value.details()


def test_a_second_server_cannot_share_the_port(pod: ServerProcess) -> None:
    with serve("--front-ends", "2", "--port", str(pod.port), wait=False) as second:
        assert second.process.wait(60) == 1
        assert "the address is in use" in second.log.read_text()


def test_a_front_end_that_hangs_is_replaced_and_costs_its_own_streams_alone(
    pod: ServerProcess, clients: list[Client]
) -> None:
    before = pod.front_end_pids()
    streams = [Stream(client, max_new_tokens=300) for client in clients]
    os.kill(before[0], signal.SIGSTOP)
    # Whoever waits for nobody hears of it too.
    assert streams[1].code() is grpc.StatusCode.UNAVAILABLE
    wait_for(lambda: gone(before[0]))
    for stream in (streams[0], streams[2]):
        assert len(collect(stream.rest(), 1).samples[0].token_ids) == 300
    wait_for(lambda: "a front end serves again" in pod.log.read_text())
    assert before[1] in pod.front_end_pids()
    (new,) = set(pod.front_end_pids()) - set(before)
    request = text_request(PROMPT, stopping=SHORT)
    texts = {
        generate(client.stub, request).samples[0].text
        for client in one_each(pod)
        if client.front_end in (new, pod.process.pid)
    }
    assert len(texts) == 1
    assert pod.health() == SERVING


def test_nobody_outlives_a_killed_first_front_end(pod: ServerProcess) -> None:
    children = pod.children()
    children += [pid for each in pod.front_end_pids() for pid in children_of(each)]
    assert len(children) == FRONT_ENDS * (1 + TEXT_WORKERS)
    pod.process.kill()
    pod.process.wait()
    wait_for(lambda: all(gone(pid) for pid in children))


def test_every_front_end_wants_the_token_also_for_what_it_hands_on(guarded: ServerProcess) -> None:
    for client in one_each(guarded):
        assert client.shard.Info(pb.InfoRequest(), metadata=KNOWN).device_type == "cpu"
        request = text_request(PROMPT, stopping=SHORT)
        assert generate(client.stub, request, metadata=KNOWN).samples
        for call in (client.shard.Info, client.shard.Tokens):
            with pytest.raises(grpc.RpcError) as refused:
                call(pb.InfoRequest() if call is client.shard.Info else pb.TokensRequest())
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(client.channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == SERVING


def test_a_drain_finishes_streams_and_routers_batches_of_all_and_leaves_nobody(
    guarded: ServerProcess,
) -> None:
    clients, children = one_each(guarded), guarded.children()
    streams = [Stream(client, max_new_tokens=200) for client in clients]
    held = clients[1].shard.Prefill(pb.PrefillRequest(batch=batch(1, 11)), metadata=KNOWN).batch
    guarded.process.send_signal(signal.SIGTERM)
    for pid in guarded.front_end_pids():
        # As an init process or a terminal might: stopping is the first one's business.
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: guarded.health() == NOT_SERVING)
    for client in clients:
        request = text_request(PROMPT, stopping=SHORT)
        refused = until_refused(client.stub, request, metadata=KNOWN)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError) as full:
        clients[2].shard.Prefill(pb.PrefillRequest(batch=batch(2, 12)), metadata=KNOWN)
    assert full.value.code() is grpc.StatusCode.UNAVAILABLE
    for at in range(8):
        assert held.request_ids == [11]
        shard = clients[at % FRONT_ENDS].shard
        decoded = shard.Decode(pb.DecodeRequest(batches=[held]), metadata=KNOWN)
        held = decoded.batch
    assert decoded.generations[0].generated_text.generated_tokens == 9
    assert not decoded.HasField("batch")
    for stream in streams:
        assert len(collect(stream.rest(), 1).samples[0].token_ids) == 200
    assert guarded.process.wait(60) == 0
    assert "cut_off_batches=0" in guarded.log.read_text()
    assert all(gone(pid) for pid in children)


def test_a_killed_front_end_costs_its_own_streams_and_the_pod_drains() -> None:
    with serve("--front-ends", str(FRONT_ENDS)) as server:
        clients, children = one_each(server), server.children()
        streams = [Stream(client, max_new_tokens=200) for client in clients]
        os.kill(clients[1].front_end, signal.SIGKILL)
        assert streams[1].code() is grpc.StatusCode.UNAVAILABLE
        for stream in (streams[0], streams[2]):
            assert len(collect(stream.rest(), 1).samples[0].token_ids) == 200
        assert server.process.wait(60) == 1
        assert "front end 1 ended with status -9" in server.log.read_text()
        assert all(gone(pid) for pid in children)


def test_a_lost_engine_is_lost_to_all() -> None:
    with serve("--front-ends", str(FRONT_ENDS)) as server:
        clients, children = one_each(server), server.children()
        streams = [client.long() for client in clients]
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert {stream.code() for stream in streams} == {grpc.StatusCode.UNAVAILABLE}
        assert server.process.wait(60) == 1
        assert all(gone(pid) for pid in children)
