"""Messages of `Generate` and `Tokens` to plain values: the only module that knows both."""

from __future__ import annotations

from tokenpod.service.calls.call import (
    GenerateCall,
    Output,
    Prompt,
    Sampling,
    Stopping,
    TokensCall,
)
from tokenpod.service.calls.chats import ChatMessage, ChatPrompt
from tokenpod.service.calls.limits import check_chat_length
from tokenpod.service.dialects.fields import copied, given
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

_NANOSECONDS_OF_MS = 1_000_000


async def generate_call(request: pb.GenerateRequest) -> GenerateCall:
    """What `request` asks for. Other tasks get their turn while long lists are copied."""
    stopping = given(request.stopping, Stopping)
    return GenerateCall(
        prompt=await _prompt(request),
        sampling=Sampling(**given(request.sampling, Sampling)),
        stopping=Stopping(
            **stopping, time_limit_ns=request.stopping.time_limit_ms * _NANOSECONDS_OF_MS
        ),
        output=Output(**given(request.output, Output)),
        truncate=request.truncate,
        request_id=request.request_id,
        priority=request.priority,
    )


def tokens_call(request: pb.TokensRequest) -> TokensCall:
    """What `request` asks for."""
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    prompt = _chat(request.chat) if request.HasField("chat") else request.text
    return TokensCall(prompt, special, request.return_ids)


async def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return await copied(request.token_ids.ids)
        case "chat":
            return _chat(request.chat)
        case _:
            return None


def _chat(chat: pb.Chat) -> ChatPrompt:
    check_chat_length(len(chat.messages))
    generation = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return ChatPrompt([ChatMessage(m.role, m.content) for m in chat.messages], generation)
