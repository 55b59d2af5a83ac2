"""A conversation as chat templates expect it: dicts, as Hugging Face's libraries make them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from tokenpod.service.calls.chats import ChatMessage, ChatPrompt, Tool, ToolCall

#: What templates get for a tool without arguments: some look into it.
_NO_ARGUMENTS = {"type": "object", "properties": {}}


class ChatTemplateError(ValueError):
    """A conversation can't become a prompt. The text is for the client (INVALID_ARGUMENT).

    `field`: the conversation's field at fault; "": the whole.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def messages_of(chat: ChatPrompt, *, in_parts: bool = False) -> list[dict[str, Any]]:
    """A dict for each turn. What a turn lacks is not there: templates ask `is defined`.

    `in_parts`: every content is a list of parts, not those with images alone.
    """
    return [dict(_fields(message, in_parts)) for message in chat.messages]


def _fields(message: ChatMessage, in_parts: bool) -> Iterator[tuple[str, Any]]:
    yield "role", message.role
    yield "content", _parts(message) if message.images or in_parts else message.content
    if message.reasoning:
        yield "reasoning_content", message.reasoning
    if message.tool_calls:
        yield "tool_calls", [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        yield "tool_call_id", message.tool_call_id
    if message.name:
        yield "name", message.name


def _parts(message: ChatMessage) -> list[dict[str, str]]:
    """The content of a message, cut where images stand."""
    parts: list[dict[str, str]] = []
    at = 0
    for place in message.images:
        if place > at:
            parts.append({"type": "text", "text": message.content[at:place]})
        parts.append({"type": "image"})
        at = place
    if at < len(message.content):
        parts.append({"type": "text", "text": message.content[at:]})
    return parts


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = _read(call.arguments)
    except ValueError:
        # A model wrote it, and is to see what it wrote.
        arguments = call.arguments
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def tools_of(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """A dict for each tool; None: there are none.

    ChatTemplateError: a schema is no JSON object.
    """
    return [_tool(tool, at) for at, tool in enumerate(tools)] or None


def _tool(tool: Tool, at: int) -> dict[str, Any]:
    field = f"tools[{at}].parameters_schema"
    try:
        schema = _read(tool.schema) if tool.schema else _NO_ARGUMENTS
    except ValueError as error:
        raise ChatTemplateError(f"is no JSON: {error}", field) from error
    if not isinstance(schema, dict):
        raise ChatTemplateError("is no JSON object, as the schema of arguments must be", field)
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def _read(text: str) -> Any:
    """A JSON value. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
