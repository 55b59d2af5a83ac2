"""Calls of tools as constraints: what the format of the model's family reads, and nothing else.

Made in the text workers: a client's schemas may take long, and much memory.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from msgspec import structs

from tokenpod.core.constraints import Tagged
from tokenpod.service.calls.chats import ChatPrompt, Tool
from tokenpod.service.constraints.json_schema import (
    MOST_SCHEMAS,
    SchemaError,
    TooManySchemas,
    check_schema,
    read_schema,
)
from tokenpod.service.text.parsers.calls import CallFormat, ToolCallShape, ToolsError

#: Of a tool whose schema can't be compiled, and of one that has no arguments.
_ANY: Mapping[str, Any] = {"type": "object"}
_NONE: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_constraint(chat: ChatPrompt, calls: CallFormat, template: str) -> Tagged:
    """How the model may, or must, call the tools of a chat.

    A tool's schema says what its arguments are for the model too, so one that is not supported is
    no fault of the request: its arguments are then any JSON object.

    Args:
        chat: with tools.
        calls: how the model writes calls.
        template: the model's chat template.

    Raises:
        ToolsError: the tools have too many schemas.
    """
    shapes, left = [], MOST_SCHEMAS
    for tool in chat.tools:
        if not chat.only or tool.name == chat.only:
            schema, count = _arguments_of(tool, left)
            left -= count
            shapes.append(ToolCallShape(tool.name, schema))
    tagged = calls.tagged(shapes, template, must=chat.must_call)
    # Where all is between marks, a turn without a call has tags too.
    one = chat.only or not chat.several_calls
    most = 1 if one and (chat.must_call or not calls.framed) else None
    least = 1 if chat.must_call or tagged.before else 0
    return structs.replace(tagged, least=least, most=most, lenient=True)


def _arguments_of(tool: Tool, most: int) -> tuple[Mapping[str, Any], int]:
    """The schema of a tool's arguments, and how many schemas it holds: `most` at most."""
    if not tool.schema:
        return _NONE, 0
    try:
        schema = read_schema(tool.schema)
        count = _end(check_schema(schema, most))
    except TooManySchemas:
        raise ToolsError(f"have more than {MOST_SCHEMAS} schemas") from None
    except SchemaError:
        return _ANY, 0
    return (schema if "type" in schema else {"type": "object"} | schema), count


def _end(work: Generator[None, None, int]) -> int:
    """What work comes to that need not be divided here."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return int(done.value)
