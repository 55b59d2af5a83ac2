"""Chats with tools and reasoning, from the request to its events and back, without a server."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from tokenizers import Tokenizer as Backend

from support.engines.engine_link import QuietEngine
from support.texts.chat_templates import FAMILIES, PARIS, QWEN, ROME, SPECIAL_TOKENS, Written
from tokenpod.core.outputs import FinishCode
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.service.calls.errors import FailedPrecondition, InvalidArgument
from tokenpod.service.calls.generation import Generation
from tokenpod.service.dialects.tokenpod_v1.chats import MOST_CALLS, MOST_TOOLS, MOST_VALUES
from tokenpod.service.dialects.tokenpod_v1.codec import generate_call
from tokenpod.service.dialects.tokenpod_v1.writer import EventWriter
from tokenpod.service.serving.serving import Serving
from tokenpod.service.text.parsers.turn import formats_of
from tokenpod.service.text.tokenizers.chat_template import ChatTemplateError
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer
from tokenpod_client.protos.tokenpod.v1 import chat_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

DEMO = Path(__file__).parents[2] / "models" / "demo" / "tokenizer.json"
BOS, EOS = 0, 1
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}, "a": {}}}'
TOOLS = [{"name": "get_weather", "description": "The weather.", "parametersSchema": SCHEMA}]
QUESTION = {"role": "user", "content": [{"text": "How is the weather?"}]}


def tokenizer_with(template: str) -> Tokenizer:
    backend = Backend.from_file(str(DEMO))
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return Tokenizer(
        backend, eos_token_ids=frozenset([EOS]), chat_template=template, special_tokens=named
    )


def asking(**more: Any) -> pb.GenerateRequest:
    """A chat with a tool; fields in JSON's names."""
    return ParseDict(
        {"chat": {"messages": [QUESTION], "tools": TOOLS, **more}}, pb.GenerateRequest()
    )


class Turns:
    """A model with a template whose next turn is what a test says."""

    def __init__(self, template: str, tool_parser: str = "auto") -> None:
        self.tokenizer = tokenizer_with(template)
        encoder: Any = SimpleNamespace(tokenizer=self.tokenizer)
        settings: Any = SimpleNamespace(tool_parser=tool_parser)
        none = dict.fromkeys(field.name for field in dataclasses.fields(Serving))
        formats = formats_of(template, tool_parser, "auto")
        given = {"encoder": encoder, "settings": settings, "formats": formats, "since": 0}
        self.serving = Serving(**{**none, **given})  # type: ignore[arg-type]

    async def rendered(self, request: pb.GenerateRequest) -> str:
        prompt: Any = (await generate_call(request, "", stream=True)).prompt
        return self.tokenizer.render_chat(prompt)

    async def answered(
        self, request: pb.GenerateRequest, written: str, *, ends: bool = True, stream: bool = True
    ) -> Any:
        """The stream of a turn that is written token by token, or the whole answer."""
        call = await generate_call(request, "", stream=stream)
        self.serving.check_tools(call)
        ids = self.tokenizer.encode(written, add_special_tokens=False)
        asked = Request([0], [5], SamplingParams(), StoppingParams(len(ids) + 1))
        engine = QuietEngine()
        samples = self.serving.samples_of(call, asked, await self.rendered(request))
        generation = Generation(
            asked,
            samples,
            engine,
            streamed=stream,
        )
        writer = EventWriter(call, generation, self.tokenizer, model_id="m", request_id="r")
        events = []
        for at, token in enumerate([*ids, EOS] if ends else ids):
            last = at == len(ids) - (not ends)
            finish = (FinishCode.EOS if ends else FinishCode.LENGTH) if last else FinishCode.RUNNING
            generation.on_token(0, token, 0.0, finish, None)
            while stream and (event := writer.next()) is not None:
                events.append(event)
        return events if stream else writer.whole()


def added_up(events: list[pb.GenerateResponse]) -> tuple[str, str, list[chat_pb2.ToolCall]]:
    """What the deltas of a stream come to."""
    text, reasoning, calls = "", "", list[chat_pb2.ToolCall]()
    for event in events:
        text += event.tokens.text
        reasoning += event.tokens.reasoning
        if event.tokens.HasField("tool_call"):
            piece = event.tokens.tool_call
            if piece.id:
                calls.append(chat_pb2.ToolCall(id=piece.id, name=piece.name))
            assert piece.call_index == len(calls) - 1
            calls[-1].arguments += piece.arguments
    return text, reasoning, calls


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_familys_turn_is_told_apart_and_goes_back(family: str) -> None:
    case = FAMILIES[family]
    turns = Turns(case.template)
    request = asking()
    if not case.calls and "tools" not in case.template:
        del request.chat.tools[:]
    events = await turns.answered(request, case.written)
    text, reasoning, calls = added_up(events)
    (finished,) = [event.finished for event in events if event.HasField("finished")]
    message = finished.message
    assert (text, reasoning) == (case.text, case.reasoning)
    assert (finished.text, finished.reasoning) == (text, reasoning)
    assert list(message.tool_calls) == calls
    assert [(call.name, call.arguments) for call in calls] == list(case.calls)
    expected = pb.FINISH_REASON_TOOL_CALLS if calls else pb.FINISH_REASON_EOS_TOKEN
    assert finished.finish_reason == expected
    usage = events[-1].completed.usage
    if reasoning:
        thought, mark = map(
            turns.tokenizer.encode, (case.written.partition("</think>")[0], "</think>")
        )
        least, most = len(thought) - 4, len(thought) + len(mark)
        assert least <= usage.reasoning_token_count <= most, "the marks are counted"
    else:
        assert usage.reasoning_token_count == 0
    # As it came: unchanged, with answers to its calls behind.
    prompt = await turns.rendered(request)
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.chat.messages.append(message)
    for call in calls:
        again.chat.messages.add(role="tool", tool_call_id=call.id).content.add(text='"rain"')
    history = await turns.rendered(again)
    rewritten = case.written if case.again is None else case.again
    if case.template == FAMILIES["deepseek"].template:
        prompt = prompt.removesuffix("<think>\n")
    made = re.sub("|".join(call.id for call in calls) or "^$", "ID", history)
    assert made.startswith(prompt + rewritten), "the template writes what the model wrote"
    assert history.count("rain") == len(calls) + case.text.count("rain")


async def test_a_whole_answer_is_what_the_stream_adds_up_to() -> None:
    case = FAMILIES["qwen"]
    result = (await Turns(case.template).answered(asking(), case.written, stream=False)).results[0]
    assert (result.text, result.reasoning) == (case.text, case.reasoning)
    assert [(c.name, c.arguments) for c in result.message.tool_calls] == list(case.calls)
    assert result.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert result.tokens.WhichOneof("delta") is None
    assert len(result.tokens.token_ids) == result.generated_token_count


async def test_raw_text_is_all_that_the_model_writes() -> None:
    for tool_parser in ("auto", "none"):
        turns = Turns(QWEN, tool_parser)
        request, written = asking(), FAMILIES["qwen"].written
        request.output.raw_text = True
        events = await turns.answered(request, written)
        assert added_up(events) == (written, "", [])
        assert events[-1].completed.usage.reasoning_token_count == 0


async def test_tools_are_refused_where_their_calls_would_be_text() -> None:
    with pytest.raises(FailedPrecondition, match="--tool-parser is none"):
        await Turns(QWEN, "none").answered(asking(), "x")
    with pytest.raises(ChatTemplateError, match="shows no tools") as caught:
        await Turns(FAMILIES["deepseek"].template).rendered(asking())
    assert caught.value.field == "tools"


async def test_a_model_that_may_not_call_is_not_told_of_tools() -> None:
    turns = Turns(QWEN)
    request = asking(toolChoice={"mode": "TOOL_MODE_NONE"})
    assert "get_weather" not in await turns.rendered(request)
    written = FAMILIES["qwen, a call alone"].written
    assert added_up(await turns.answered(request, written)) == (written, "", [])
    auto = asking(toolChoice={"mode": "TOOL_MODE_AUTO"})
    assert "get_weather" in await turns.rendered(auto)


async def test_one_call_alone_ends_the_turn() -> None:
    written = FAMILIES["qwen"].written
    events = await Turns(QWEN).answered(asking(parallelToolCalls=False), written)
    (finished,) = [event.finished for event in events if event.HasField("finished")]
    (call,) = finished.message.tool_calls
    assert call.arguments == PARIS
    assert finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert added_up(events)[2] == [call]
    assert ROME not in str(events)


async def test_what_is_cut_off_says_so() -> None:
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city'
    events = await Turns(QWEN).answered(asking(), written, ends=False)
    (finished,) = [event.finished for event in events if event.HasField("finished")]
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.message.tool_calls[0].arguments == '{"city'
    # And can be sent back: the model sees what it wrote.
    again = asking()
    again.chat.messages.append(finished.message)
    assert '{\\"city' in await Turns(QWEN).rendered(again)


async def test_stop_sequences_end_the_text_before_it_is_told_apart() -> None:
    request = asking()
    request.stopping.stop_sequences.append("Paris")
    events = await Turns(QWEN).answered(request, FAMILIES["qwen, a call alone"].written)
    (finished,) = [event.finished for event in events if event.HasField("finished")]
    assert finished.stop_sequence == "Paris"
    assert finished.message.tool_calls[0].arguments == '{"city": "'


# -- what templates get ------------------------------------------------------------------------


async def test_a_template_gets_tools_arguments_and_the_rest_of_messages() -> None:
    shown = "{{ [tools, messages, enable_thinking, n, deep, documents] | tojson }}"
    request = asking(
        templateArguments={"enable_thinking": False, "n": 3, "deep": {"a": [1.5, None, "x"]}},
        messages=[
            {"role": "user", "name": "ada", "content": [{"text": "a"}, {"refusal": "b"}]},
            {
                **{"role": "assistant", "reasoning": "Hm."},
                "toolCalls": [{"id": "1", "name": "get_weather", "arguments": PARIS}],
            },
            {"role": "tool", "toolCallId": "1", "content": [{"text": "rain"}]},
        ],
    )
    request.chat.tools.add(name="none")
    tools, messages, thinking, n, deep, documents = json.loads(await Turns(shown).rendered(request))
    assert (thinking, n, deep, documents) == (False, 3, {"a": [1.5, None, "x"]}, None)
    empty = {"type": "object", "properties": {}}
    assert [tool["function"]["parameters"] for tool in tools] == [json.loads(SCHEMA), empty]
    assert list(tools[0]["function"]["parameters"]["properties"]) == ["city", "a"], "in their order"
    arguments = {"name": "get_weather", "arguments": json.loads(PARIS)}
    assert messages == [
        {"role": "user", "content": "ab", "name": "ada"},
        {
            **{"role": "assistant", "content": "", "reasoning_content": "Hm."},
            "tool_calls": [{"id": "1", "type": "function", "function": arguments}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]


async def test_thinking_is_switched_by_an_argument_of_the_template() -> None:
    turns = Turns(QWEN)
    off = asking(templateArguments={"enable_thinking": False})
    assert (await turns.rendered(off)).endswith("<think>\n\n</think>\n\n")
    assert added_up(await turns.answered(off, "It rains.")) == ("It rains.", "", [])


def tools(**tool: Any) -> dict[str, Any]:
    return {"tools": [{**TOOLS[0], **tool}]}


WRONG_SCHEMAS = {
    "no JSON": "{",
    "no object": "[1]",
    "no number": '{"a": NaN}',
    "too deep": "[" * 100_000,
    "a number without end": '{"a": ' + "9" * 10_000 + "}",
    "words": "string",
}


@pytest.mark.parametrize("schema", WRONG_SCHEMAS.values(), ids=WRONG_SCHEMAS)
async def test_a_wrong_schema_is_refused_by_its_path(schema: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        await Turns(QWEN).rendered(asking(**tools(parametersSchema=schema)))
    assert caught.value.field == "tools[0].parameters_schema"
    assert len(str(caught.value)) < 200


async def test_a_deep_schema_in_a_template_that_recurses_is_refused() -> None:
    recursing = (
        "{% macro show(x) %}"
        "{% for k, v in x.items() %}{{ k }}{{ show(v) }}{% endfor %}"
        "{% endmacro %}"
        "{{ show(tools[0].function.parameters) }}"
    )
    turns = Turns(recursing)
    assert await turns.rendered(asking(**tools(parametersSchema='{"a": {"b": {}}}'))) == "ab"
    deep = '{"a": ' * 400 + "{}" + "}" * 400
    with pytest.raises(ChatTemplateError, match="RecursionError"):
        await turns.rendered(asking(**tools(parametersSchema=deep)))


async def test_half_a_character_in_a_call_of_the_past_is_no_end_of_the_chat() -> None:
    call = {"id": "1", "name": "get_weather", "arguments": '{"city": "\\ud83d"}'}
    said = [QUESTION, {"role": "assistant", "toolCalls": [call]}]
    shown = "{{ messages[1].tool_calls[0].function.arguments.city }}{{ tools is none }}"
    assert await Turns(shown).rendered(asking(messages=said, tools=[])) == "�True"


REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "chat.tools[0].name": (InvalidArgument, tools(name="")),
    "chat.tools[1].name": (InvalidArgument, {"tools": TOOLS * 2}),
    "chat.tools": (InvalidArgument, {"tools": TOOLS * (MOST_TOOLS + 1)}),
    "chat.tool_choice": (InvalidArgument, {"toolChoice": {}}),
    "chat.tool_choice.mode": (InvalidArgument, {"toolChoice": {"mode": 0}}),
    "chat.tool_choice.mode ": (
        InvalidArgument,
        {"tools": [], "toolChoice": {"mode": "TOOL_MODE_REQUIRED"}},
    ),
    "chat.tool_choice.tool_name": (InvalidArgument, {"toolChoice": {"toolName": "nobody"}}),
    "chat.messages[0].tool_calls": (
        InvalidArgument,
        {"messages": [{"role": "assistant", "toolCalls": [{}] * (MOST_CALLS + 1)}]},
    ),
    "chat.template_arguments": (InvalidArgument, {"templateArguments": {"a b": 1}}),
    "chat.template_arguments ": (InvalidArgument, {"templateArguments": {"a": [0] * MOST_VALUES}}),
}


@pytest.mark.parametrize("field", REFUSED)
async def test_a_chat_that_no_template_could_have_is_refused_by_its_path(field: str) -> None:
    kind, more = REFUSED[field]
    with pytest.raises(kind) as caught:
        await generate_call(asking(**more), "", stream=True)
    assert getattr(caught.value, "field", None) == field.strip()


@pytest.mark.parametrize("name", ["messages", "tools", "range", "bos_token", "raise_exception"])
async def test_arguments_of_a_template_replace_nothing_of_the_servers(name: str) -> None:
    with pytest.raises(ChatTemplateError, match="can't be replaced") as caught:
        await Turns(QWEN).rendered(asking(templateArguments={name: "x"}))
    assert caught.value.field == f"template_arguments.{name}"


def test_every_family_is_tried() -> None:
    assert {formats_of(f.template, "auto", "auto").calls for f in FAMILIES.values()} >= {
        formats_of("", name, "none").calls
        for name in ("hermes", "mistral", "pythonic", "llama3_json")
    }
    assert all(isinstance(family, Written) for family in FAMILIES.values())
