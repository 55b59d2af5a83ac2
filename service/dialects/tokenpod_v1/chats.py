"""Chats of `tokenpod.v1` to plain values."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from tokenpod.service.calls.chats import ChatMessage, ChatPrompt, Tool, ToolCall
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenImage
from tokenpod.service.calls.limits import check_chat_length, few_entries
from tokenpod_client.protos.tokenpod.v1 import chat_pb2 as pb

#: Messages or tools that are converted before others get their turn.
_SLICE = 256
MOST_TOOLS = 512
MOST_CALLS = 128
#: Values in the arguments of a template, those in lists and objects included.
MOST_VALUES = 2048
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


async def chat_prompt(chat: pb.Chat, images: list[GivenImage]) -> ChatPrompt:
    """What `chat` says; its images are added to `images`. Others get their turn meanwhile.

    Raises InvalidArgument for what no template could be given.
    """
    check_chat_length(len(chat.messages))
    few_entries("chat.tools", len(chat.tools), MOST_TOOLS)
    messages: list[ChatMessage] = []
    for at, message in enumerate(chat.messages):
        if at % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
        messages.append(_message(message, f"chat.messages[{at}]", images))
    tools: dict[str, Tool] = {}
    for at, tool in enumerate(chat.tools):
        if at % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
        _check_tool(tool, tools, f"chat.tools[{at}].name")
        tools[tool.name] = Tool(tool.name, tool.description, tool.parameters_schema)
    may, must, only = _choice(chat, tools)
    return ChatPrompt(
        messages,
        add_generation_prompt=_unless_unset(chat, "add_generation_prompt"),
        tools=[*tools.values()] if may else [],
        several_calls=_unless_unset(chat, "parallel_tool_calls"),
        arguments=_arguments(chat.template_arguments),
        must_call=must,
        only=only,
    )


def _unless_unset(message: Any, field: str) -> bool:
    """A bool that is true unless a client says otherwise."""
    return getattr(message, field) if message.HasField(field) else True


def _message(message: pb.ChatMessage, path: str, images: list[GivenImage]) -> ChatMessage:
    few_entries(f"{path}.tool_calls", len(message.tool_calls), MOST_CALLS)
    texts: list[str] = []
    places: list[int] = []
    size = 0
    for number, part in enumerate(message.content):
        field = f"{path}.content[{number}]"
        if part.WhichOneof("part") == "image":
            images.append(_image(part.image, f"{field}.image"))
            places.append(size)
        else:
            texts.append(_text(part, field))
            size += len(texts[-1])
    return ChatMessage(
        message.role,
        "".join(texts),
        message.reasoning,
        [ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls],
        message.tool_call_id,
        message.name,
        places,
    )


def _image(image: pb.Image, field: str) -> GivenImage:
    source = image.WhichOneof("source")
    if source is None:
        raise InvalidArgument(field, "has no data")
    if source == "uri":
        return GivenImage(b"", f"{field}.uri", image.uri)
    return GivenImage(image.data, f"{field}.data")


def _text(part: pb.ContentPart, path: str) -> str:
    kind = part.WhichOneof("part")
    if kind is None:
        raise InvalidArgument(path, "has neither a text nor anything else")
    return part.refusal if kind == "refusal" else part.text


def _check_tool(tool: pb.Tool, others: dict[str, Tool], field: str) -> None:
    if not _TOOL_NAME.fullmatch(tool.name):
        raise InvalidArgument(field, "is not 1 to 64 letters, digits, _ and -")
    if tool.name in others:
        raise InvalidArgument(field, f"is {tool.name!r}, as another tool's is")


def _choice(chat: pb.Chat, tools: Mapping[str, Tool]) -> tuple[bool, bool, str]:
    """Whether the model may call tools (else it is not told of them), must, and which alone."""
    if not chat.HasField("tool_choice"):
        return True, False, ""
    choice, mode = chat.tool_choice.WhichOneof("choice"), chat.tool_choice.mode
    if choice is None:
        raise InvalidArgument("chat.tool_choice", "has neither mode nor tool_name")
    if choice == "tool_name":
        name = chat.tool_choice.tool_name
        if name not in tools:
            raise InvalidArgument("chat.tool_choice.tool_name", f"is {name!r:.100}: no such tool")
        return True, True, name
    if mode == pb.TOOL_MODE_UNSPECIFIED:
        raise InvalidArgument("chat.tool_choice.mode", "is TOOL_MODE_UNSPECIFIED, which is none")
    must = mode == pb.TOOL_MODE_REQUIRED
    if must and not tools:
        raise InvalidArgument("chat.tool_choice.mode", "is TOOL_MODE_REQUIRED without chat.tools")
    return must or mode == pb.TOOL_MODE_AUTO, must, ""


# -- template arguments ------------------------------------------------------------------------

_ARGUMENTS = "chat.template_arguments"


def _arguments(given: Struct) -> dict[str, Any]:
    count = iter(range(MOST_VALUES))
    found: dict[str, Any] = {}
    for name, value in given.fields.items():
        if not _VARIABLE.fullmatch(name):
            problem = "has a name that is not a letter or _ and up to 63 more, or digits"
            raise InvalidArgument(_ARGUMENTS, problem)
        found[name] = _value(value, count)
    return found


def _value(value: Value, count: Iterator[int]) -> Any:
    """A value of Python; whole numbers become ints, as they were in JSON."""
    if next(count, None) is None:
        raise InvalidArgument(_ARGUMENTS, f"has more than {MOST_VALUES} values")
    match value.WhichOneof("kind"):
        case "null_value":
            return None
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidArgument(_ARGUMENTS, f"has {number}, which is no number of JSON")
            return int(number) if number.is_integer() and abs(number) < 2**53 else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return {name: _value(v, count) for name, v in value.struct_value.fields.items()}
        case "list_value":
            return [_value(v, count) for v in value.list_value.values]
        case _:
            raise InvalidArgument(_ARGUMENTS, "has a value of no kind")
