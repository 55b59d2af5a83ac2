"""How large a request may be, method by method.

The table is about what is believable, not about what is allowed: validate.py says that, by names
and numbers. Whatever passes here is parsed and checked in a few milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2

from tokenpod.service.dialects.tgi.codec import codecs
from tokenpod.service.rpc.errors import InvalidArgument
from tokenpod.service.rpc.wire import MESSAGE_FIELDS, WHOLE, Size

#: For messages up to this size the table's numbers hold; larger ones, which come from routers'
#: sockets alone, may hold more in proportion.
PLAIN_BYTES = 4 * 1024 * 1024

_KILOBYTE = 1024


@dataclass(frozen=True, slots=True)
class MethodLimits:
    """What one message of a method may be.

    Args:
        bytes: at most; None: what the listener takes.
        size: what it may hold.
    """

    bytes: int | None
    size: Size

    def size_for(self, length: int) -> Size:
        """What a message of `length` bytes may hold; raises InvalidArgument if it is too long."""
        if self.bytes is not None and length > self.bytes:
            problem = f"has {length} bytes; this method takes at most {self.bytes}"
            raise InvalidArgument(WHOLE, problem)
        if length <= PLAIN_BYTES:
            return self.size
        scale = length / PLAIN_BYTES
        return Size(math.ceil(self.size.fields * scale), math.ceil(self.size.elements * scale))


#: Messages that say next to nothing.
SMALL = MethodLimits(4 * _KILOBYTE, Size(fields=64, elements=64))
#: A prompt, with a list of stops and biases or a long chat.
_PROMPT = MethodLimits(None, Size(fields=32_768, elements=262_144))
#: Thousands of prompts, each with a router's own table of slots.
_BATCH = MethodLimits(None, Size(fields=131_072, elements=1_310_720))
_ROUTERS_BATCH = MethodLimits(None, Size(fields=524_288, elements=2_097_152))
#: Numbers of requests.
_NAMES = MethodLimits(1024 * _KILOBYTE, Size(fields=8192, elements=131_072))

_METHODS: Mapping[str, MethodLimits] = {
    "Generate": _PROMPT,
    "Tokens": _PROMPT,
    "Prefill": _BATCH,
    "Warmup": _BATCH,
    "Decode": _NAMES,
    "FilterBatch": _NAMES,
    "ClearCache": SMALL,
    "Info": SMALL,
    "ServiceDiscovery": SMALL,
    "Health": SMALL,
}
_HEALTH = ("Check", "Watch", "List")
_REFLECTION = (
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)


def method_limits(
    *, max_logit_bias: int = 0, max_stop_sequences: int = 0, trusted: bool = False
) -> dict[str, MethodLimits]:
    """The limits of every method of every service, by `/package.Service/Method`.

    Args:
        max_logit_bias, max_stop_sequences: what the operator lets a request have; each counts.
        trusted: routers alone can reach the listener, and what they reserved is never refused: a
            batch may have four times as many requests.
    """
    # An entry of a map is a message with two fields.
    chosen = (MESSAGE_FIELDS + 2) * max_logit_bias + max_stop_sequences
    more = {
        _PROMPT: MethodLimits(None, Size(_PROMPT.size.fields + chosen, _PROMPT.size.elements)),
        _BATCH: _ROUTERS_BATCH if trusted else _BATCH,
    }
    limits = dict.fromkeys(_REFLECTION, SMALL)
    for codec in codecs():
        service: ServiceDescriptor = codec.pb.DESCRIPTOR.services_by_name["TextGenerationService"]
        for method in service.methods:
            own = _METHODS[method.name]
            limits[f"/{service.full_name}/{method.name}"] = more.get(own, own)
    health: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
    return limits | {f"/{health.full_name}/{name}": SMALL for name in _HEALTH}
