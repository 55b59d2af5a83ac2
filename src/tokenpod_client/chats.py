"""Chats from dictionaries as OpenAI's API has them, and from messages of tokenpod.v1."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf import struct_pb2

from tokenpod_client.protos.tokenpod.v1 import chat_pb2
from tokenpod_client.shapes import entries_of, schema_text, text_of, wrong


class SchemaModel(Protocol):
    """What pydantic's model classes have: they stand for a JSON Schema."""

    def model_json_schema(self) -> dict[str, Any]:
        """The schema."""
        ...


#: A turn: {"role": ..., "content": ...}, or the protocol's own.
Message = chat_pb2.ChatMessage | Mapping[str, Any]
#: {"type": "function", "function": {"name": ..., "parameters": ...}}, or the protocol's own.
Tool = chat_pb2.Tool | Mapping[str, Any]
#: "auto", "none", "required", {"type": "function", "function": {"name": ...}}, or the protocol's.
ToolChoice = str | Mapping[str, Any] | chat_pb2.ToolChoice

_MESSAGES = (
    'a list of messages, each {"role": ..., "content": ...} or a ChatMessage; '
    "one message is a list of one"
)
_MESSAGE = (
    '{"role": "system" | "user" | "assistant" | "tool", "content": a text or a list of parts}, '
    'an assistant\'s with "tool_calls" and "reasoning", a tool\'s with "tool_call_id"; '
    "or a ChatMessage"
)
_MESSAGE_KEYS = (
    *("role", "content", "tool_calls", "tool_call_id", "name"),
    *("reasoning", "reasoning_content", "refusal"),
)
_CONTENT = "a text, a list of parts, or None"
_PART = (
    '{"type": "text", "text": ...}, {"type": "refusal", "refusal": ...}, '
    '{"type": "image_url", "image_url": {"url": ...}}, or a ContentPart'
)
_IMAGE = '{"url": "https://..." or "data:image/png;base64,..."}'
_CALLS = "a list of calls"
_CALL = (
    '{"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON text}}, '
    "or a ToolCall"
)
_CALLED = '{"name": ..., "arguments": JSON text}'
_TOOLS = "a list of tools"
_TOOL = (
    '{"type": "function", "function": {"name": ..., "description": ..., "parameters": a JSON '
    "Schema}}, or a Tool"
)
_FUNCTION = '{"name": ..., "description": ..., "parameters": a JSON Schema}'
_CHOICE = (
    '"auto", "none", "required", {"type": "function", "function": {"name": ...}}, or a ToolChoice'
)
_MODES = {
    "auto": chat_pb2.TOOL_MODE_AUTO,
    "none": chat_pb2.TOOL_MODE_NONE,
    "required": chat_pb2.TOOL_MODE_REQUIRED,
}


def chat_of(messages: Iterable[Message]) -> chat_pb2.Chat:
    """A chat of messages, in their order. Raises TypeError that names the message at fault."""
    return chat_pb2.Chat(messages=_each("messages", messages, _MESSAGES, message_of))


def message_of(where: str, given: object) -> chat_pb2.ChatMessage:
    """One turn. Raises TypeError."""
    if isinstance(given, chat_pb2.ChatMessage):
        return given
    found = entries_of(where, given, _MESSAGE, _MESSAGE_KEYS)
    if "role" not in found:
        raise wrong(where, given, _MESSAGE)
    message = chat_pb2.ChatMessage(
        role=text_of(f"{where}.role", found["role"]),
        reasoning=text_of(
            f"{where}.reasoning", found.get("reasoning", found.get("reasoning_content", ""))
        ),
        tool_call_id=text_of(f"{where}.tool_call_id", found.get("tool_call_id", "")),
        name=text_of(f"{where}.name", found.get("name", "")),
        tool_calls=_each(f"{where}.tool_calls", found.get("tool_calls", ()), _CALLS, _call_of),
    )
    content = found.get("content", "")
    if isinstance(content, str):
        if content:
            message.content.add(text=text_of(f"{where}.content", content))
    else:
        message.content.extend(_each(f"{where}.content", content, _CONTENT, _part_of))
    if refusal := found.get("refusal"):
        message.content.add(refusal=text_of(f"{where}.refusal", refusal))
    return message


def tools_of(given: object) -> list[chat_pb2.Tool]:
    """What the model may call. Raises TypeError that names the tool at fault."""
    return _each("tools", given, _TOOLS, _tool_of)


def tool_choice_of(given: object) -> chat_pb2.ToolChoice:
    """Whether the model calls a tool, and which. Raises TypeError."""
    if isinstance(given, chat_pb2.ToolChoice):
        return given
    if isinstance(given, str):
        if given not in _MODES:
            raise wrong("tool_choice", given, _CHOICE)
        return chat_pb2.ToolChoice(mode=_MODES[given])
    found = entries_of("tool_choice", given, _CHOICE, ("type", "function"))
    if found.get("type") != "function" or "function" not in found:
        raise wrong("tool_choice", given, _CHOICE)
    named = entries_of("tool_choice.function", found["function"], '{"name": ...}', ("name",))
    return chat_pb2.ToolChoice(tool_name=text_of("tool_choice.function.name", named.get("name")))


def arguments_of(given: Any) -> struct_pb2.Struct:
    """Variables for the template. Raises TypeError."""
    if isinstance(given, struct_pb2.Struct):
        return given
    made = struct_pb2.Struct()
    try:
        made.update(given)
    except (TypeError, ValueError, AttributeError):
        forms = 'a mapping of names to JSON values, such as {"enable_thinking": False}'
        raise wrong("template_arguments", given, forms) from None
    return made


def _each(where: str, given: object, forms: str, of: Any) -> list[Any]:
    """What `of` makes of each entry of a list, which it is given with its place."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise wrong(where, given, forms)
    return [of(f"{where}[{index}]", each) for index, each in enumerate(given)]


def _part_of(where: str, given: object) -> chat_pb2.ContentPart:
    if isinstance(given, chat_pb2.ContentPart):
        return given
    if isinstance(given, str):
        return chat_pb2.ContentPart(text=text_of(where, given))
    found = entries_of(where, given, _PART, ("type", "text", "refusal", "image_url"))
    match found:
        case {"type": "text", "text": text, **rest} if not rest:
            return chat_pb2.ContentPart(text=text_of(f"{where}.text", text))
        case {"type": "refusal", "refusal": text, **rest} if not rest:
            return chat_pb2.ContentPart(refusal=text_of(f"{where}.refusal", text))
        case {"type": "image_url", "image_url": image, **rest} if not rest:
            return chat_pb2.ContentPart(image=_image_of(f"{where}.image_url", image))
    raise wrong(where, given, _PART)


def _image_of(where: str, given: object) -> chat_pb2.Image:
    found = entries_of(where, given, _IMAGE, ("url", "detail"))
    url = text_of(f"{where}.url", found.get("url"))
    if not url.startswith("data:"):
        return chat_pb2.Image(uri=url)
    head, comma, data = url.removeprefix("data:").partition(",")
    try:
        if not (comma and head.endswith(";base64")):
            raise binascii.Error
        decoded = base64.b64decode(data, validate=True)
    except binascii.Error:
        raise wrong(f"{where}.url", url, _IMAGE) from None
    return chat_pb2.Image(data=decoded, mime_type=head.removesuffix(";base64").partition(";")[0])


def _call_of(where: str, given: object) -> chat_pb2.ToolCall:
    if isinstance(given, chat_pb2.ToolCall):
        return given
    # Pieces of a stream have an index, which is no more than their place in the list.
    found = entries_of(where, given, _CALL, ("id", "type", "function", "index"))
    if found.get("type", "function") != "function" or "function" not in found:
        raise wrong(where, given, _CALL)
    place = f"{where}.function"
    called = entries_of(place, found["function"], _CALLED, ("name", "arguments"))
    arguments = called.get("arguments", "")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return chat_pb2.ToolCall(
        id=text_of(f"{where}.id", found.get("id", "")),
        name=text_of(f"{place}.name", called.get("name")),
        arguments=text_of(f"{place}.arguments", arguments),
    )


def _tool_of(where: str, given: object) -> chat_pb2.Tool:
    if isinstance(given, chat_pb2.Tool):
        return given
    found = entries_of(where, given, _TOOL, ("type", "function"))
    if found.get("type") != "function" or "function" not in found:
        raise wrong(where, given, _TOOL)
    place = f"{where}.function"
    # `strict` asks for what is always so: arguments conform to the schema.
    known = ("name", "description", "parameters", "strict")
    function = entries_of(place, found["function"], _FUNCTION, known)
    schema = function.get("parameters", "")
    return chat_pb2.Tool(
        name=text_of(f"{place}.name", function.get("name")),
        description=text_of(f"{place}.description", function.get("description", "")),
        parameters_schema=schema_text(f"{place}.parameters", schema),
    )


def texts_of(parts: Sequence[chat_pb2.ContentPart]) -> str:
    """What the parts of a message say, as templates get it."""
    return "".join(part.text or part.refusal for part in parts)
