"""The library, sync and async, against a small real server on a thread and a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tokenpod_client import AsyncClient, Client, GenerateOptions, ServerError
from tokenpod_client.protos.tokenpod.v1 import (
    adapter_pb2,
    adapter_service_pb2,
    chat_pb2,
    model_pb2,
)
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.adapter_service_pb2_grpc import (
    AdapterServiceServicer,
    add_AdapterServiceServicer_to_server,
)
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    add_GenerationServiceServicer_to_server,
)
from tokenpod_client.requests import OPENAI_NAMES, PARTS, generate_request

#: How long a test waits for what must come.
PATIENCE = 60
USAGE = pb.Usage(prompt_token_count=3, generated_token_count=2)


class Scripted(GenerationServiceServicer, AdapterServiceServicer):
    """Answers by the prompt, on threads."""

    def __init__(self) -> None:
        self.address = ""
        self.calls: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.cancelled = threading.Event()

    def Generate(self, request, context):
        self.calls.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self._refuse(request.text, context)
        if request.text == "slow":
            context.add_callback(self.cancelled.set)
        yield pb.GenerateResponse(started=pb.Started(request_id="r1"))
        # An event of a kind that this client does not know.
        yield pb.GenerateResponse.FromString(b"\xfa\x01\x02\x08\x01")
        yield pb.GenerateResponse(tokens=pb.Tokens(sample_index=0, token_ids=[7], text="He"))
        yield pb.GenerateResponse(tokens=pb.Tokens(sample_index=1, token_ids=[9], reasoning="hm"))
        if request.text == "slow":
            assert self.cancelled.wait(PATIENCE)
        if request.text == "breaks":
            self._full(context)
        yield pb.GenerateResponse(tokens=pb.Tokens(sample_index=0, token_ids=[8], text="y"))
        yield pb.GenerateResponse(finished=pb.Finished(sample_index=0, text="Hey"))
        yield pb.GenerateResponse(completed=pb.Completed(usage=USAGE))

    def GenerateOnce(self, request, context):
        self.calls.append(request.request)
        self._refuse(request.request.text, context)
        return service.GenerateOnceResponse(results=[pb.Finished(text="Hey")], usage=USAGE)

    def Tokenize(self, request, context):
        assert request.return_token_ids
        return service.TokenizeResponse(token_count=2, token_ids=[4, len(request.text)])

    def Detokenize(self, request, context):
        return service.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    def GetModel(self, request, context):
        return service.GetModelResponse(model=model_pb2.Model(name="some"))

    def ListAdapters(self, request, context):
        names = {"": ("law", "more"), "more": ("sql", "")}
        name, token = names[request.page_token]
        page = [adapter_pb2.Adapter(name=name)]
        return adapter_service_pb2.ListAdaptersResponse(adapters=page, next_page_token=token)

    def GetLoad(self, request, context):
        return service.GetLoadResponse(running_sequence_count=3)

    def _refuse(self, text: str, context: grpc.ServicerContext) -> None:
        if text == "busy" and len(self.calls) < 3:
            self._full(context)
        if text == "full":
            self._full(context, "3600000")
        if text == "large":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no hint")
        if text == "wrong":
            bad = error_details_pb2.BadRequest()
            bad.field_violations.add(field="sampling.top_p", description="is 7; at most 1")
            packed = Packed()
            packed.Pack(bad)
            wrong = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, details=[packed])
            context.abort_with_status(rpc_status.to_status(wrong))

    def _full(self, context: grpc.ServicerContext, milliseconds: str = "1") -> None:
        context.set_trailing_metadata((("grpc-retry-pushback-ms", milliseconds),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    running = grpc.server(futures.ThreadPoolExecutor(8))
    add_GenerationServiceServicer_to_server(scripted, running)
    add_AdapterServiceServicer_to_server(scripted, running)
    scripted.address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    running.start()
    yield scripted
    running.stop(0).wait()


class Waiting:
    """`AsyncClient` with the calls of `Client`, so that one set of tests is about both."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = self._do(self._make, *arguments, **options)

    async def _make(self, *arguments, **options):
        return AsyncClient(*arguments, **options)

    def _do(self, method, *arguments, **options):
        running = asyncio.run_coroutine_threadsafe(method(*arguments, **options), self._loop)
        return running.result(PATIENCE)

    def generate(self, *arguments, **options):
        return WaitingStream(self._do, self._client.generate(*arguments, **options))

    def __getattr__(self, name: str):
        method = getattr(self._client, name)
        return lambda *arguments, **options: self._do(method, *arguments, **options)

    def close(self) -> None:
        self._do(self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)


class WaitingStream:
    """`AsyncStream` as `Stream`."""

    def __init__(self, do, stream) -> None:
        self._do, self._stream = do, stream

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return self._do(self._stream.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def text(self) -> str:
        return self._do(self._stream.text)

    def close(self) -> None:
        self._do(self._stream.close)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


@pytest.fixture(params=[Client, Waiting], ids=["sync", "async"])
def client(request, server) -> Iterator[Callable[..., Client]]:
    """Makes a client of the server."""
    made = []

    def make(**options: object) -> Client:
        made.append(request.param(server.address, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_stream_yields_deltas_and_knows_the_rest_at_its_end(client, server):
    stream = client(token="secret").generate("hi", max_new_tokens=3, temperature=0.5, n=2)
    deltas = list(stream)
    assert [(each.sample_index, each.text) for each in deltas] == [(0, "He"), (1, ""), (0, "y")]
    assert [each.reasoning for each in deltas] == ["", "hm", ""]
    assert list(deltas[0].tokens.token_ids) == [7]
    assert stream.started.request_id == "r1"
    assert (stream.finished[0].text, stream.usage) == ("Hey", USAGE)
    assert server.metadata[0]["authorization"] == "Bearer secret"
    expected = pb.GenerateRequest(
        text="hi",
        sampling=pb.SamplingOptions(temperature=0.5, n=2),
        stopping=pb.StoppingOptions(max_new_tokens=3),
        output=pb.OutputOptions(),
    )
    assert server.calls == [expected]


def test_text_is_that_of_the_first_sample(client):
    assert client().generate("hi").text() == "Hey"


def test_the_other_calls(client):
    made = client()
    assert made.generate_once("hi").results[0].text == "Hey"
    assert made.tokenize("abc") == [4, 3]
    assert made.detokenize([1, 2]) == "1 2"
    assert (made.model().name, made.load().running_sequence_count) == ("some", 3)
    assert [each.name for each in made.adapters()] == ["law", "sql"]


def test_a_call_that_is_refused_with_a_hint_is_sent_again(client, server):
    assert client().generate("busy").text() == "Hey"
    assert len(server.calls) == 3
    server.calls.clear()
    assert client().generate_once("busy").results[0].text == "Hey"
    assert len(server.calls) == 3


def test_no_more_often_than_is_allowed(client, server):
    with pytest.raises(ServerError) as caught:
        client(attempts=2).generate("busy").text()
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(server.calls) == 2


@pytest.mark.parametrize("prompt", ["large", "full", "wrong", "breaks"])
def test_what_would_not_help_is_not_sent_again(client, server, prompt):
    """No hint; a hint beyond the deadline; a wrong request; an answer that had begun."""
    with pytest.raises(ServerError) as caught:
        client(deadline=PATIENCE).generate(prompt).text()
    assert len(server.calls) == 1
    assert caught.value.retry_after == {"full": 3600.0, "breaks": 0.001}.get(prompt)


def test_a_wrong_request_names_its_fields(client):
    with pytest.raises(ServerError) as caught:
        client().generate_once("wrong")
    assert caught.value.violations == (("sampling.top_p", "is 7; at most 1"),)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_that_is_closed_is_cancelled_on_the_server(client, server):
    stream = client().generate("slow")
    assert next(stream).text == "He"
    assert not server.cancelled.is_set()
    stream.close()
    assert server.cancelled.wait(PATIENCE)
    assert list(stream) == []


def test_a_stream_that_nobody_holds_any_more_is_cancelled(server):
    with Client(server.address) as one:
        for delta in one.generate("slow"):
            assert delta.text == "He"
            break
        del delta
        assert server.cancelled.wait(PATIENCE)


def test_a_deadline_ends_a_stream(client, server):
    with pytest.raises(ServerError) as caught:
        client().generate("slow", deadline=3).text()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_server_that_is_not_there_is_tried_as_often_as_is_allowed(monkeypatch):
    monkeypatch.setattr("tokenpod_client.patience._FIRST_PAUSE", 0.001)
    with Client("127.0.0.1:1", attempts=3) as one, pytest.raises(ServerError) as caught:
        one.model()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.retry_after is None


def test_prompts_are_texts_ids_or_chats():
    assert list(generate_request([1, 2]).token_ids.ids) == [1, 2]
    ours = chat_pb2.ChatMessage(role="user")
    chat = generate_request([{"role": "system", "content": "Be."}, ours]).chat
    assert [each.role for each in chat.messages] == ["system", "user"]
    assert chat.messages[0].content[0].text == "Be."
    tools = chat_pb2.Chat(messages=[ours], tools=[chat_pb2.Tool(name="f")])
    assert generate_request(tools).chat == tools
    assert generate_request("x", time_limit=1.5).stopping.time_limit.ToMilliseconds() == 1500


def test_every_option_has_a_field_and_others_are_refused():
    messages = [pb.GenerateRequest, *PARTS.values(), chat_pb2.Chat]
    fields = {name for kind in messages for name in kind.DESCRIPTOR.fields_by_name}
    prompts = {
        field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields
    }
    ours = fields - prompts - {"messages"}
    assert set(GenerateOptions.__annotations__) == ours | set(OPENAI_NAMES)
    assert set(OPENAI_NAMES.values()) <= ours
    problem = r"tokenpod\.v1\.GenerateRequest has no field max_tokns; did you mean max_tokens\?"
    with pytest.raises(TypeError, match=problem):
        generate_request("x", max_tokns=3)
    with pytest.raises(TypeError, match="has no field token_ids"):
        generate_request("x", token_ids=[1])


def test_a_part_is_also_given_as_a_whole():
    flat = generate_request("x", max_new_tokens=3, time_limit=1.5, n=2)
    assert generate_request("x", stopping={"max_new_tokens": 3, "time_limit": 1.5}, n=2) == flat
    whole = pb.StoppingOptions(max_new_tokens=3, stop_sequences=["."])
    mixed = generate_request("x", stopping=whole, ignore_eos=True).stopping
    assert (mixed.max_new_tokens, list(mixed.stop_sequences)) == (3, ["."])
    assert mixed.ignore_eos


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"stopping": {"max_tokens": 3}}, "StoppingOptions has no field max_tokens"),
        ({"sampling": {"n": 2}, "n": 3}, "n is given twice: by itself and in sampling"),
        ({"output": 7}, "output is 7: it must be a mapping of fields, or OutputOptions"),
    ],
)
def test_a_part_with_a_mistake_is_refused_by_name(options, problem):
    with pytest.raises(TypeError, match=problem):
        generate_request("x", **options)
