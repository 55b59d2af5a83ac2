"""Requests made from the protobuf descriptors, so that a new field is tried too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb

from tokenpod_client.protos.fmaas import generation_pb2 as fmaas_pb
from tokenpod_client.protos.generate.v1 import generate_pb2 as v1
from tokenpod_client.protos.generate.v2 import generate_pb2 as v2
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import adapter_service_pb2 as adapters_pb
from tokenpod_client.protos.tokenpod.v1 import embedding_service_pb2 as embedding_pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as tokenpod_pb

TOKENPOD, FMAAS, VLLM, ADAPTERS = "tokenpod", "fmaas", "vllm", "adapters"
EMBEDDING = "embedding"
GENERATIONS: dict[str, ModuleType] = {"v1": v1, "v2": v2, "v3": v3}
ENOUGH_EVENTS = 6
PROMPT = "def fibonacci(n):\n"

F = FieldDescriptor
U32, U64 = 2**32 - 1, 2**64 - 1
FLOAT_MAX, FLOAT_TINY = 3.4028234e38, 1e-45
#: Extreme values of each type: the first is its zero.
EXTREMES: dict[int, Sequence[Any]] = {
    F.TYPE_UINT32: (0, 1, 2**31 - 1, 2**31, U32),
    F.TYPE_UINT64: (0, 1, 2**63 - 1, 2**63, U64),
    F.TYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    F.TYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    F.TYPE_FLOAT: (
        *(0.0, -0.0, -1.0, 1.0, FLOAT_TINY, -FLOAT_TINY),
        *(FLOAT_MAX, -FLOAT_MAX, math.nan, math.inf, -math.inf),
    ),
    F.TYPE_BOOL: (False, True),
    F.TYPE_STRING: ("", "\0", "\n", "\U0010ffff", "é" * 130, "x" * 20_000),
    F.TYPE_BYTES: (b"", b"\xff" * 1000),
    F.TYPE_ENUM: (0, 1, 2, 99, -1, 2**31 - 1),
}


#: Bytes that are no message of any kind.
GARBAGE = {
    "a tag and no value": b"\x0a",
    "a length beyond the end": b"\x0a\xff\xff\xff\xff\x0f",
    "an endless varint": b"\x80" * 64,
    "no such wire type": b"\x0f\x01",
    "a group that never ends": b"\x0b" * 200,
    "noise": bytes(range(255, 0, -1)),
}


@dataclass(frozen=True)
class Rpc:
    """One rpc of one protocol: of one of TGI's wire generations, or by the protocol's name."""

    generation: str
    method: MethodDescriptor

    def __str__(self) -> str:
        return f"{self.generation}.{self.method.name}"

    @property
    def request_class(self) -> Any:
        return GetMessageClass(self.method.input_type)

    def send(self, channel: grpc.Channel, data: bytes, timeout: float = 60.0) -> list[Any]:
        """Send raw bytes; the answers, or grpc.RpcError."""
        parse = GetMessageClass(self.method.output_type).FromString
        path = f"/{self.method.containing_service.full_name}/{self.method.name}"
        if self.method.server_streaming:
            stream = channel.unary_stream(path, response_deserializer=parse)(data, timeout=timeout)
            # Some of these are legal and long: a few events tell enough.
            events = list(itertools.islice(stream, ENOUGH_EVENTS))
            stream.cancel()
            return events
        call = channel.unary_unary(path, response_deserializer=parse)
        return [call(data, timeout=timeout)]

    @property
    def short(self) -> bytes:
        """Fields that, behind any others, keep a legal answer short where nobody reads it early."""
        if str(self) != f"{VLLM}.Generate":
            return b""
        limits = vllm_pb.GenerateRequest(sampling_params={"max_tokens": 2})
        return bytes(limits.SerializeToString())

    def plain(self) -> Any:
        """A request that is fine; Decode and FilterBatch name batch 7, request 5."""
        if (plain_of := PLAIN.get(self.generation)) is not None:
            return GetMessageClass(self.method.input_type)(**plain_of.get(self.method.name, {}))
        return plain(self.generation, self.method.name)


#: Rpcs whose request is another one's, in a message of its own, and a legal one is answered when
#: all of its tokens are there; and one whose stream never ends.
OTHERS_MESSAGES = ("GenerateOnce", "SubscribeKvEvents")


def rpcs() -> list[Rpc]:
    """Those that a pod answers whose model generates; it refuses others before it reads them."""
    services = {
        name: pb.DESCRIPTOR.services_by_name["TextGenerationService"]
        for name, pb in GENERATIONS.items()
    }
    services[TOKENPOD] = tokenpod_pb.DESCRIPTOR.services_by_name["GenerationService"]
    services[ADAPTERS] = adapters_pb.DESCRIPTOR.services_by_name["AdapterService"]
    services[FMAAS] = fmaas_pb.DESCRIPTOR.services_by_name["GenerationService"]
    services[VLLM] = vllm_pb.DESCRIPTOR.services_by_name["VllmEngine"]
    return [
        Rpc(name, method)
        for name, service in services.items()
        for method in service.methods
        if method.name not in OTHERS_MESSAGES and method.name != "Embed"
    ]


def embedding_rpcs() -> list[Rpc]:
    """Those that give a pod's vectors, where its model embeds."""
    services = {
        EMBEDDING: embedding_pb.DESCRIPTOR.services_by_name["EmbeddingService"],
        VLLM: vllm_pb.DESCRIPTOR.services_by_name["VllmEngine"],
    }
    return [Rpc(name, service.methods_by_name["Embed"]) for name, service in services.items()]


#: Of the protocols whose clients ask for text: requests that are fine, by the rpcs' names.
PLAIN: dict[str, dict[str, dict[str, Any]]] = {
    TOKENPOD: {
        "Generate": {"text": PROMPT, "stopping": {"max_new_tokens": 2}},
        "Tokenize": {"text": PROMPT},
        "Detokenize": {"token_ids": [5, 6]},
    },
    EMBEDDING: {
        "Embed": {"inputs": [{"text": "x"}]},
        "Score": {"query": "x", "documents": [PROMPT]},
        "Classify": {"inputs": [{"text": PROMPT}]},
    },
    ADAPTERS: {
        "LoadAdapter": {"name": "one", "path": "one"},
        "UnloadAdapter": {"name": "one"},
    },
    FMAAS: {
        "Generate": {"requests": [{"text": PROMPT}], "params": {"stopping": {"max_new_tokens": 2}}},
        "GenerateStream": {
            "request": {"text": PROMPT},
            "params": {"stopping": {"max_new_tokens": 2}},
        },
        "Tokenize": {"requests": [{"text": PROMPT}]},
    },
    VLLM: {
        "Generate": {"text": PROMPT, "sampling_params": {"max_tokens": 2}, "stream": True},
        "Abort": {"request_ids": ["not there"]},
        "Embed": {"tokenized": {"input_ids": [5]}},
    },
}


def plain(generation: str, method: str) -> Any:
    pb = GENERATIONS[generation]
    match method:
        case "Generate":
            return v3.GenerateRequest(text=PROMPT, stopping={"max_new_tokens": 2})
        case "Prefill":
            return pb.PrefillRequest(batch=batch(pb))
        case "Decode":
            return pb.DecodeRequest(batches=[pb.CachedBatch(id=7, request_ids=[5], size=1)])
        case "FilterBatch":
            return pb.FilterBatchRequest(batch_id=7, request_ids=[5])
        case "Warmup":
            request = pb.WarmupRequest(batch=batch(pb))
            if generation == "v2":
                request.max_input_length, request.max_total_tokens = 10, 20
            return request
        case "Tokens":
            return pb.TokensRequest(text=PROMPT)
        case _:
            return getattr(pb, f"{method}Request")()


def batch(pb: ModuleType) -> Any:
    stopping = pb.StoppingCriteriaParameters(max_new_tokens=3)
    parameters = pb.NextTokenChooserParameters(temperature=1, repetition_penalty=1)
    request = pb.Request(
        id=5, inputs=PROMPT, truncate=100, parameters=parameters, stopping_parameters=stopping
    )
    return pb.Batch(id=7, requests=[request], size=1, max_tokens=103)


@dataclass(frozen=True)
class Case:
    """One field of a request at one extreme."""

    rpc: Rpc
    #: Names from the request down, `a.b.c`; indices are left out.
    path: str
    field: FieldDescriptor
    value: Any
    data: bytes

    def __str__(self) -> str:
        return f"{self.rpc}:{self.path}={str(self.value)[:30]}"


def cases(rpc: Rpc) -> Iterator[Case]:
    """Every field of `rpc`'s request at every extreme of its type, the rest of it plain."""
    for path in paths(rpc.method.input_type):
        for value in extremes(path[-1]):
            request = rpc.plain()
            put(request, path, value)
            name = ".".join(field.name for field in path)
            yield Case(rpc, name, path[-1], value, request.SerializeToString())


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def paths(kind: Descriptor, above: tuple[FieldDescriptor, ...] = ()) -> Iterator[Any]:
    """Every field below a message, itself the last of the fields that lead to it.

    Below a message that can hold itself is no end.
    """
    for field in kind.fields:
        yield (*above, field)
        if field.message_type is None or _is_map(field):
            continue
        if field.message_type.full_name != "google.protobuf.Struct":
            yield from paths(field.message_type, (*above, field))


def extremes(field: FieldDescriptor) -> Sequence[Any]:
    """Values to assign; for repeated fields, lists of them."""
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        if value.message_type is not None:
            return [{}]
        # Neither is a zero.
        a_key, a_value = EXTREMES[key.type][1], EXTREMES[value.type][2]
        one_key = [{each: a_value} for each in EXTREMES[key.type]]
        return [{}, *one_key, *({a_key: each} for each in EXTREMES[value.type])]
    if field.message_type is not None:
        return ([], [{}], [{}] * 300) if field.is_repeated else ({},)
    values = EXTREMES[field.type]
    if not field.is_repeated:
        return values
    return [[], *([value] for value in values), [values[1]] * 10_000]


def put(request: Any, path: Sequence[FieldDescriptor], value: Any) -> None:
    """Set the field at `path` to `value`; makes what lies above it."""
    message = request
    for field in path[:-1]:
        below = getattr(message, field.name)
        if field.is_repeated:
            below = below[0] if below else below.add()
        else:
            below.SetInParent()
        message = below
    field = path[-1]
    if _is_map(field):
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        message.ClearField(field.name)
        target = getattr(message, field.name)
        target.extend(field.message_type._concrete_class() for _ in value) if (
            field.message_type
        ) else target.extend(value)
    elif field.message_type is not None:
        message.ClearField(field.name)
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, value)


def clear(channel: grpc.Channel) -> None:
    """Forget the batches of every test before."""
    for rpc in rpcs():
        if rpc.method.name == "ClearCache":
            rpc.send(channel, b"")


def string_fields(kind: Descriptor) -> Iterator[Any]:
    """The path to each text field."""
    for path in paths(kind):
        if path[-1].type == F.TYPE_STRING:
            yield path


def raw(path: Sequence[FieldDescriptor], payload: bytes) -> bytes:
    """A request that holds `payload` in the length-delimited field at `path`, and nothing else."""
    for field in reversed(path):
        payload = varint(field.number << 3 | 2) + varint(len(payload)) + payload
    return payload


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
