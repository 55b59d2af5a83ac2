"""Messages of `Generate` and `Tokens` to plain values: the only module that knows both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tokenpod.protos.generate.v3 import generate_pb2 as pb
from tokenpod.service.dialects import validate
from tokenpod.service.serving.calls import (
    ChatPrompt,
    GenerateCall,
    Output,
    Prompt,
    Sampling,
    Stopping,
    TokensCall,
)

#: Token ids that are copied before others get their turn: some milliseconds.
_SLICE_IDS = 32_768


async def generate_call(request: pb.GenerateRequest) -> GenerateCall:
    """What `request` asks for. Other tasks get their turn while long lists are copied."""
    sampling, stopping, output = request.sampling, request.stopping, request.output
    return GenerateCall(
        prompt=await _prompt(request),
        sampling=Sampling(**_fields(sampling) | {"logit_bias": dict(sampling.logit_bias)}),
        stopping=Stopping(
            **_fields(stopping)
            | {
                "stop_sequences": tuple(stopping.stop_sequences),
                "stop_token_ids": tuple(stopping.stop_token_ids),
            }
        ),
        output=Output(**_fields(output) | {"stream": _unless_unset(output, "stream")}),
        truncate=request.truncate,
        request_id=request.request_id,
        priority=request.priority,
    )


def tokens_call(request: pb.TokensRequest) -> TokensCall:
    """What `request` asks for."""
    special = _unless_unset(request, "add_special_tokens")
    prompt = _chat(request.chat) if request.HasField("chat") else request.text
    return TokensCall(prompt, special, request.return_ids)


def _fields(message: Any) -> dict[str, Any]:
    """A message's fields by name; None where one that may be absent is."""
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
    }


def _unless_unset(message: Any, field: str) -> bool:
    """A bool that is true unless a client says otherwise."""
    return getattr(message, field) if message.HasField(field) else True


async def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return await _copied(request.token_ids.ids)
        case "chat":
            return _chat(request.chat)
        case _:
            return None


async def _copied(ids: Sequence[int]) -> tuple[int, ...]:
    copied: list[int] = []
    for at in range(0, len(ids), _SLICE_IDS):
        if at:
            await asyncio.sleep(0)
        copied += ids[at : at + _SLICE_IDS]
    return tuple(copied)


def _chat(chat: pb.Chat) -> ChatPrompt:
    validate.check_chat_length(len(chat.messages))
    generation = _unless_unset(chat, "add_generation_prompt")
    return ChatPrompt([(m.role, m.content) for m in chat.messages], generation)
