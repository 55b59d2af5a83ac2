"""What of a request this server does, and what it does not do yet: one list says both.

A field that is not built is UNIMPLEMENTED where a client sets it, because a request that is served
without it gets a wrong answer. `GetModel` lists all others.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor

from tokenpod.service.calls.errors import Unimplemented
from tokenpod.service.dialects.fields import is_map
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

#: Paths of fields; what lies below them is not built either. Requests to tokenise have the same
#: chats.
NOT_BUILT: frozenset[str] = frozenset()
#: Fields of requests with tools.
_TOOLS = ("chat.tools", "chat.tool_choice", "chat.parallel_tool_calls")
#: Messages that are looked at before others get their turn: a millisecond or two.
_SLICE = 512

#: Where to look in a message, by the names of its fields; None: the field is not built.
Places = Mapping[str, "Places | None"]


def _places() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in NOT_BUILT:
        *above, name = path.split(".")
        inside = found
        for part in above:
            inside = inside.setdefault(part, {})
        inside[name] = None
    return found


_PLACES: Places = _places()


def check_built(request: Any) -> Iterator[None]:
    """Raise Unimplemented for the first field that is not built; yields now and then."""
    for looked, _ in enumerate(_check(request, _PLACES, "")):
        if looked % _SLICE == _SLICE - 1:
            yield


def _check(message: Any, places: Places, path: str) -> Generator[None]:
    yield
    for field, value in message.ListFields():
        if field.name not in places:
            continue
        below, name = places[field.name], f"{path}{field.name}"
        if below is None:
            raise Unimplemented(name, "is not supported by this server")
        if not field.is_repeated:
            yield from _check(value, below, f"{name}.")
            continue
        for at, each in enumerate(value):
            yield from _check(each, below, f"{name}[{at}].")


def features(
    *, chats: bool, tools: bool, adapters: bool, constraints: bool, images: bool, urls: bool
) -> list[str]:
    """Paths of the fields of a request that this server takes.

    Args:
        chats: the model has a chat template.
        tools: it shows the model its tools, and calls can be parsed from its text.
        adapters: there are slots for them.
        constraints: the model's tokens add bytes of their own to a text.
        images: the model sees them.
        urls: it fetches some.
    """
    left_out = () if chats and tools else _TOOLS if chats else ("chat",)
    left_out = left_out if adapters else (*left_out, "adapter")
    left_out = left_out if constraints else (*left_out, "constraint")
    left_out = left_out if images else (*left_out, "chat.messages.content.image")
    left_out = left_out if urls else (*left_out, "chat.messages.content.image.uri")
    paths = _paths(pb.GenerateRequest.DESCRIPTOR, "")
    return [path for path in paths if not f"{path}.".startswith(tuple(f"{x}." for x in left_out))]


def _paths(kind: Descriptor, above: str) -> Iterator[str]:
    for field in kind.fields:
        path = f"{above}{field.name}"
        if path in NOT_BUILT:
            continue
        if field.message_type is None or is_map(field) or not _divisible(field.message_type):
            yield path
        else:
            yield from _paths(field.message_type, f"{path}.")


def _divisible(kind: Descriptor) -> bool:
    """Whether a message has fields of this protocol: google's are values, and some have none."""
    return bool(kind.file.package == pb.DESCRIPTOR.package and kind.fields)
