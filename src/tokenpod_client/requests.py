"""Requests from arguments: each is put where the message of tokenpod.v1 has a field of its name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any, TypedDict

from tokenpod_client.chats import (
    Message,
    SchemaModel,
    Tool,
    ToolChoice,
    arguments_of,
    chat_of,
    tool_choice_of,
    tools_of,
)
from tokenpod_client.protos.tokenpod.v1 import chat_pb2, generation_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.shapes import entries_of, fill, schema_text, text_of, wrong

#: A text, token ids, the messages of a chat, or a chat as a whole.
Prompt = str | Sequence[int] | Sequence[Message] | chat_pb2.Chat

#: Parts of a request, by the names of its fields.
PARTS: dict[str, Any] = {
    "sampling": generation_pb2.SamplingOptions,
    "stopping": generation_pb2.StoppingOptions,
    "output": generation_pb2.OutputOptions,
}
#: Options of chats: fields of `Chat`.
CHAT_OPTIONS = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("template_arguments", "add_generation_prompt"),
)
#: OpenAI's names of options, and ours.
OPENAI_NAMES = {
    "stop": "stop_sequences",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "logprobs": "return_logprobs",
    "top_logprobs": "top_n_tokens",
    "response_format": "constraint",
    "chat_template_kwargs": "template_arguments",
}

_PROMPT = (
    "a text, a list of token ids, a Chat, or a list of messages, "
    'each {"role": ..., "content": ...} or a ChatMessage'
)
_FORMAT = (
    '{"type": "text"}, {"type": "json_object"}, '
    '{"type": "json_schema", "json_schema": {"name": ..., "schema": a JSON Schema}}, '
    "or a pydantic model's class"
)


class GenerateOptions(TypedDict, total=False):
    """Fields of `GenerateRequest` and of its parts; protos say more. None is as if not given."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    stop_sequences: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_sequence: bool | None
    #: Seconds, or a timedelta.
    time_limit: float | timedelta | None
    #: Fields of `EosBoost`.
    eos_boost: Mapping[str, float] | generation_pb2.EosBoost | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    #: Ids of tokens as numbers, or as OpenAI's API has them, as texts.
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    watermark: bool | None
    n: int | None
    best_of: int | None
    #: Fields of `BeamSearch`.
    beam: Mapping[str, float] | generation_pb2.BeamSearch | None
    return_logprobs: bool | None
    return_ranks: bool | None
    return_text_offsets: bool | None
    top_n_tokens: int | None
    return_prompt_logprobs: bool | None
    prompt_top_n_tokens: int | None
    return_final_text: bool | None
    raw_text: bool | None
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    #: Off: the tokens of each sample at once, when all have ended.
    stream: bool | None
    #: One field of `Constraint`. Schemas may be dicts or pydantic models, `choice` a list of texts.
    constraint: Mapping[str, Any] | generation_pb2.Constraint | None
    truncate: int | None
    request_id: str | None
    priority: int | None
    model: str | None
    adapter: str | None
    labels: Mapping[str, str] | None
    cache_salt: str | None
    max_draft_tokens: int | None
    #: Parts as a whole, as other languages and grpcurl write them: fields by their names.
    sampling: Mapping[str, Any] | generation_pb2.SamplingOptions | None
    stopping: Mapping[str, Any] | generation_pb2.StoppingOptions | None
    output: Mapping[str, Any] | generation_pb2.OutputOptions | None
    #: Of chats: what the model may call, as OpenAI's API has it; `parameters` may be a pydantic
    #: model.
    tools: Sequence[Tool] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    #: Of chats: variables for the template, such as {"enable_thinking": False}.
    template_arguments: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    # OpenAI's names of options above (OPENAI_NAMES).
    stop: str | Sequence[str] | None
    max_tokens: int | None
    max_completion_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    #: As OpenAI's API has it, or a pydantic model, whose JSON the text then is.
    response_format: Mapping[str, Any] | SchemaModel | None
    chat_template_kwargs: Mapping[str, Any] | None


def generate_request(prompt: Prompt, **options: Any) -> generation_pb2.GenerateRequest:
    """The message.

    Raises TypeError for an option that no field has the name of, for one that is given twice, and
    for a value of another form than its field's; the text says where, and which forms there are.
    """
    given = _values(flat(options))
    chat = {name: given.pop(name) for name in CHAT_OPTIONS if name in given}
    parts = {name: fill(kind, _fields_of(kind, given)) for name, kind in PARTS.items()}
    own = _fields_of(generation_pb2.GenerateRequest, given)
    known = {*own, *(field for kind in PARTS.values() for field in _fields_of(kind, given))}
    if unknown := given.keys() - known:
        raise _unknown(generation_pb2.GenerateRequest, min(unknown))
    request: generation_pb2.GenerateRequest = fill(generation_pb2.GenerateRequest, own)
    for name, part in parts.items():
        getattr(request, name).CopyFrom(part)
    _put_prompt(request, prompt)
    if chat:
        if not request.HasField("chat"):
            raise TypeError(f"{min(chat)} is an option of chats: the prompt must be messages")
        _put_chat_options(request.chat, chat)
    return request


def whole_request(prompt: Prompt, options: Mapping[str, Any]) -> service.GenerateOnceRequest:
    """The message of a call that returns the whole answer. Raises TypeError."""
    if options.get("stream"):
        raise TypeError("stream is True: this call returns the whole answer; `generate` streams")
    return service.GenerateOnceRequest(request=generate_request(prompt, **options))


def tokenize_request(prompt: Prompt) -> service.TokenizeRequest:
    """The message that asks for a text's or a chat's tokens. Raises TypeError."""
    request = generate_request(prompt)
    if request.HasField("token_ids"):
        raise wrong("prompt", prompt, "a text, a Chat, or a list of messages")
    if request.HasField("chat"):
        return service.TokenizeRequest(chat=request.chat)
    return service.TokenizeRequest(text=request.text)


def messages_of(messages: Any) -> chat_pb2.Chat:
    """The chat of messages. Raises TypeError for other prompts."""
    return messages if isinstance(messages, chat_pb2.Chat) else chat_of(messages)


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are set, by our names, with the fields of parts that are given as a whole.

    Raises TypeError for a field that a part does not have, and for one that is given twice.
    """
    found: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in PARTS:
            whole[name] = value
            continue
        ours = OPENAI_NAMES.get(name, name)
        if ours in found:
            names = [each for each in options if OPENAI_NAMES.get(each, each) == ours]
            raise TypeError(f"{ours} is given twice: as {' and as '.join(names)}")
        found[ours] = _OPENAI_VALUES[name](name, value) if name in _OPENAI_VALUES else value
    for part, given in whole.items():
        for name, value in _fields_in(part, given).items():
            if found.setdefault(name, value) is not value:
                raise TypeError(f"{name} is given twice: by itself and in {part}")
    return {name: value for name, value in found.items() if value is not None}


def _put_prompt(request: generation_pb2.GenerateRequest, prompt: Any) -> None:
    if isinstance(prompt, chat_pb2.Chat):
        request.chat.CopyFrom(prompt)
        return
    if isinstance(prompt, str):
        request.text = text_of("prompt", prompt)
        return
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise wrong("prompt", prompt, _PROMPT)
    entries = list(prompt)
    kinds = set(map(type, entries))
    if all(issubclass(kind, Integral) for kind in kinds):
        try:
            request.token_ids.ids.extend(entries)
        except (TypeError, ValueError):
            at = next(at for at, each in enumerate(entries) if not 0 <= each < 2**32)
            raise wrong(f"prompt[{at}]", entries[at], "a token id, from 0 to 4294967295") from None
    elif any(issubclass(kind, (str, Integral, float)) for kind in kinds):
        raise wrong("prompt", prompt, _PROMPT)
    else:
        request.chat.CopyFrom(chat_of(entries))


def _put_chat_options(chat: chat_pb2.Chat, given: Mapping[str, Any]) -> None:
    """Raises TypeError for what the chat has already."""
    for name, value in given.items():
        if name in {field.name for field, _ in chat.ListFields()}:
            raise TypeError(f"{name} is given twice: by itself and in the chat")
        match name:
            case "tools":
                chat.tools.extend(tools_of(value))
            case "tool_choice":
                chat.tool_choice.CopyFrom(tool_choice_of(value))
            case "template_arguments":
                chat.template_arguments.CopyFrom(arguments_of(value))
            case _:
                chat.MergeFrom(fill(chat_pb2.Chat, {name: value}))


def _values(options: dict[str, Any]) -> dict[str, Any]:
    """Options with values that protobuf takes, where other forms are accepted."""
    for name, convert in _CONVERSIONS.items():
        if name in options:
            options[name] = convert(options[name])
    return options


def _time_limit(given: Any) -> Any:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return given
    try:
        return timedelta(seconds=given)
    except (OverflowError, ValueError):
        raise wrong("time_limit", given, "seconds as a number, or a timedelta") from None


def _logit_bias(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    return {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in given.items()}


def _constraint(given: Any) -> Any:
    """Schemas as text, and choices as their message. Raises TypeError."""
    if isinstance(given, generation_pb2.Constraint):
        return given
    kinds = list(generation_pb2.Constraint.DESCRIPTOR.fields_by_name)
    forms = f"a mapping with one of {', '.join(kinds)}, or a Constraint"
    found = entries_of("constraint", given, forms, kinds)
    if len(found) != 1:
        raise wrong("constraint", given, forms)
    ((kind, value),) = found.items()
    match kind:
        case "json_schema":
            value = schema_text("constraint.json_schema", value)
        case "structural_tag" if isinstance(value, Mapping):
            value = json.dumps(value, ensure_ascii=False)
        case "json_object" if value is True:
            value = generation_pb2.JsonObject()
        case "choice" if isinstance(value, Sequence) and not isinstance(value, str):
            texts = [text_of(f"constraint.choice[{i}]", text) for i, text in enumerate(value)]
            value = generation_pb2.TextChoice(texts=texts)
    return fill(generation_pb2.Constraint, {kind: value}, "constraint.")


def _response_format(name: str, given: Any) -> Any:
    """What `constraint` says for it; None: nothing."""
    if callable(getattr(given, "model_json_schema", None)):
        return {"json_schema": given}
    found = entries_of(name, given, _FORMAT, ("type", "json_schema"))
    match found:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return {"json_object": {}}
        case {"type": "json_schema", "json_schema": described}:
            # A constraint has no name, and always holds as `strict` wants it.
            known = ("name", "description", "schema", "strict")
            form = '{"name": ..., "schema": a JSON Schema}'
            inner = entries_of(f"{name}.json_schema", described, form, known)
            if "schema" not in inner:
                raise wrong(f"{name}.json_schema", described, form)
            return {"json_schema": schema_text(f"{name}.json_schema.schema", inner["schema"])}
    raise wrong(name, given, _FORMAT)


def _stop(name: str, given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise wrong(name, given, "True or False; top_logprobs says how many")
    return given


#: What makes our values of OpenAI's, where they differ: of an option's name and value.
_OPENAI_VALUES: dict[str, Callable[[str, Any], Any]] = {
    "stop": _stop,
    "logprobs": _flag,
    "response_format": _response_format,
}
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "time_limit": _time_limit,
    "logit_bias": _logit_bias,
    "constraint": _constraint,
}


def _fields_in(part: str, given: Any) -> dict[str, Any]:
    """The fields of a part that is given as a whole."""
    kind = PARTS[part]
    if isinstance(given, kind):
        return {field.name: value for field, value in given.ListFields()}
    if not isinstance(given, Mapping):
        raise wrong(part, given, f"a mapping of fields, or {kind.__name__}")
    if unknown := given.keys() - kind.DESCRIPTOR.fields_by_name.keys():
        raise _unknown(kind, min(unknown))
    return dict(given)


def _fields_of(kind: Any, given: Mapping[str, object]) -> dict[str, Any]:
    """The options that are fields of `kind`. Those that say the prompt are none."""
    found = {name: given[name] for name in kind.DESCRIPTOR.fields_by_name if name in given}
    for name in ("text", "token_ids", "chat"):
        found.pop(name, None)
    return found


def _unknown(kind: Any, name: str) -> TypeError:
    if kind is generation_pb2.GenerateRequest:
        names = list(GenerateOptions.__annotations__)
    else:
        names = list(kind.DESCRIPTOR.fields_by_name)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return TypeError(f"tokenpod.v1.{kind.__name__} has no field {name}{hint}")
