"""Conversations as plain values, which travel to the text workers as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

#: What Python takes for a message, a call or a tool besides its texts.
_OBJECT_BYTES = 200


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of a tool in a turn of the past. `arguments`: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, array_like=True):
    """One turn.

    Args:
        role: as the model's template names it.
        content: what was said.
        reasoning: what the model thought before.
        tool_calls: what it called.
        tool_call_id: the call that a tool's turn answers.
        name: of the tool, or of who speaks.
        images: where in the content images stand: offsets, rising.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""
    images: Sequence[int] = ()


class Tool(msgspec.Struct, frozen=True, array_like=True):
    """What the model may call. `schema`: of its arguments, a JSON Schema as JSON text, or ""."""

    name: str
    description: str = ""
    schema: str = ""


class ChatPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A conversation, which the model's template makes a prompt of.

    Args:
        messages: the turns, in order.
        add_generation_prompt: end with the header of the assistant's turn.
        tools: those that the model may call, for its template.
        several_calls: it may call several in one turn.
        arguments: more variables of the template.
        must_call: it calls at least one, and says nothing else.
        only: the tool that it calls then, once; empty: any.
    """

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    tools: Sequence[Tool] = ()
    several_calls: bool = True
    arguments: Mapping[str, Any] = {}
    must_call: bool = False
    only: str = ""

    @property
    def characters(self) -> int:
        """About how long it is; each message, call and tool counts as some."""
        size = 0
        for m in self.messages:
            size += len(m.role) + len(m.content) + len(m.reasoning) + len(m.name) + 20
            size += sum(len(c.name) + len(c.arguments) + 20 for c in m.tool_calls)
        return size + sum(len(t.description) + len(t.schema) + 20 for t in self.tools)

    @property
    def memory(self) -> int:
        """About how many bytes of memory it takes."""
        objects = sum(1 + len(m.tool_calls) for m in self.messages) + len(self.tools)
        return _OBJECT_BYTES * objects + 4 * self.characters
