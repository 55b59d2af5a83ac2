"""Calls of tools as constraints: what the format of the model's family reads, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from tokenpod.core.constraints import Tagged
from tokenpod.service.constraints.json_schema import SchemaError, check_schema, read_schema
from tokenpod.service.serving.chats import ChatPrompt, Tool
from tokenpod.service.text.parsers.calls import CallFormat, ToolCallShape

#: Of a tool whose schema can't be compiled, and of one that has no arguments.
_ANY: Mapping[str, Any] = {"type": "object"}
_NONE: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


async def calls_constraint(chat: ChatPrompt, calls: CallFormat, template: str) -> Tagged:
    """How the model may, or must, call the tools of a chat. Others get their turn meanwhile.

    A tool's schema says what its arguments are for the model too, so one that is not supported is
    no fault of the request: its arguments are then any JSON object.
    """
    shapes = []
    for tool in chat.tools:
        if not chat.only or tool.name == chat.only:
            shapes.append(ToolCallShape(tool.name, _arguments_of(tool)))
            await asyncio.sleep(0)
    tagged = calls.tagged(shapes, template, must=chat.must_call)
    return structs.replace(
        tagged,
        least=1 if chat.must_call or tagged.before else 0,
        most=1 if chat.only or not chat.several_calls else None,
        lenient=True,
    )


def _arguments_of(tool: Tool) -> Mapping[str, Any]:
    if not tool.schema:
        return _NONE
    try:
        schema = read_schema(tool.schema)
        for _ in check_schema(schema):
            pass
    except SchemaError:
        return _ANY
    return schema if "type" in schema else {"type": "object"} | schema
