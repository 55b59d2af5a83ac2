"""Requests from arguments: each is put where the message of tokenpod.v1 has a field of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict, cast

from tokenpod_client.protos.tokenpod.v1 import chat_pb2, generation_pb2

#: The protocol's, or {"role": ..., "content": ...} with a text.
Message = chat_pb2.ChatMessage | Mapping[str, str]
#: A text, token ids, the messages of a chat, or a chat with its tools.
Prompt = str | Sequence[int] | Sequence[Message] | chat_pb2.Chat

#: Parts of a request, by the names of its fields.
PARTS: dict[str, Any] = {
    "sampling": generation_pb2.SamplingOptions,
    "stopping": generation_pb2.StoppingOptions,
    "output": generation_pb2.OutputOptions,
}


class GenerateOptions(TypedDict, total=False):
    """Fields of `GenerateRequest` and of its parts; protos say more."""

    max_new_tokens: int
    min_new_tokens: int
    stop_sequences: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_sequence: bool
    #: Seconds, or a timedelta.
    time_limit: float | timedelta
    #: Fields of `EosBoost`.
    eos_boost: Mapping[str, float]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    seed: int
    watermark: bool
    n: int
    best_of: int
    #: Fields of `BeamSearch`.
    beam: Mapping[str, float]
    return_logprobs: bool
    return_ranks: bool
    return_text_offsets: bool
    top_n_tokens: int
    return_prompt_logprobs: bool
    prompt_top_n_tokens: int
    return_final_text: bool
    raw_text: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    #: Off: the tokens of each sample at once, when all have ended.
    stream: bool
    #: One field of `Constraint`.
    constraint: Mapping[str, Any]
    truncate: int
    request_id: str
    priority: int
    model: str
    adapter: str
    labels: Mapping[str, str]
    cache_salt: str
    max_draft_tokens: int
    #: Parts as a whole, as other languages and grpcurl write them: fields by their names.
    sampling: Mapping[str, Any] | generation_pb2.SamplingOptions
    stopping: Mapping[str, Any] | generation_pb2.StoppingOptions
    output: Mapping[str, Any] | generation_pb2.OutputOptions


def generate_request(prompt: Prompt, **options: Any) -> generation_pb2.GenerateRequest:
    """The message.

    Raises TypeError for an option that no field has the name of, and for one that is given twice.
    """
    options = flat(options)
    if isinstance(limit := options.get("time_limit"), (int, float)):
        options["time_limit"] = timedelta(seconds=limit)
    parts = {name: kind(**_fields_of(kind, options)) for name, kind in PARTS.items()}
    own = _fields_of(generation_pb2.GenerateRequest, options)
    known = {*own, *(field for kind in PARTS.values() for field in _fields_of(kind, options))}
    if unknown := options.keys() - known:
        raise TypeError(f"tokenpod.v1.GenerateRequest has no field {min(unknown)}")
    request = generation_pb2.GenerateRequest(**parts, **own)
    if isinstance(prompt, chat_pb2.Chat):
        request.chat.CopyFrom(prompt)
    elif isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(each, int) for each in prompt):
        request.token_ids.ids.extend(cast(Sequence[int], prompt))
    else:
        request.chat.CopyFrom(chat_of(cast(Sequence[Message], prompt)))
    return request


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the fields of parts in the place of parts that are given as a whole.

    Raises TypeError for a field that a part does not have, and for one that is given twice.
    """
    found = {name: value for name, value in options.items() if name not in PARTS}
    for part in PARTS.keys() & options.keys():
        for name, value in _fields_in(part, options[part]).items():
            if found.setdefault(name, value) is not value:
                raise TypeError(f"{name} is given twice: by itself and in {part}")
    return found


def chat_of(messages: Sequence[Message]) -> chat_pb2.Chat:
    """A chat of messages, in their order."""
    chat = chat_pb2.Chat()
    for each in messages:
        if isinstance(each, Mapping):
            chat.messages.add(role=each["role"]).content.add(text=each["content"])
        else:
            chat.messages.add().CopyFrom(each)
    return chat


def _fields_in(part: str, given: Any) -> dict[str, Any]:
    """The fields of a part that is given as a whole."""
    kind = PARTS[part]
    if isinstance(given, kind):
        return {field.name: value for field, value in given.ListFields()}
    if not isinstance(given, Mapping):
        raise TypeError(f"{part} is {given!r}: it must be a mapping of fields, or {kind.__name__}")
    if unknown := given.keys() - kind.DESCRIPTOR.fields_by_name.keys():
        raise TypeError(f"tokenpod.v1.{kind.__name__} has no field {min(unknown)}")
    return dict(given)


def _fields_of(kind: Any, given: Mapping[str, object]) -> dict[str, Any]:
    return {name: given[name] for name in kind.DESCRIPTOR.fields_by_name if name in given}
