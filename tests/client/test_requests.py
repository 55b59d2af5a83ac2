"""What programs hold becomes messages of tokenpod.v1; errors name the forms that there are."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from tokenpod_client import Answer, Result
from tokenpod_client.answers import piece_of
from tokenpod_client.chats import chat_of
from tokenpod_client.protos.tokenpod.v1 import chat_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.requests import generate_request, tokenize_request

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}


class City(BaseModel):
    name: str
    inhabitants: int


def text(said: str) -> chat_pb2.ContentPart:
    return chat_pb2.ContentPart(text=said)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"role": "user", "content": "hi", "name": "Ada"},
            chat_pb2.ChatMessage(role="user", content=[text("hi")], name="Ada"),
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            chat_pb2.ChatMessage(role="user", content=[text("a"), text("b")]),
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            chat_pb2.ChatMessage(
                role="assistant",
                tool_calls=[chat_pb2.ToolCall(id="c1", name="f", arguments='{"x": 1}')],
            ),
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é"}}}],
            },
            chat_pb2.ChatMessage(
                role="assistant", tool_calls=[chat_pb2.ToolCall(name="f", arguments='{"x": "é"}')]
            ),
        ),
        (
            {"role": "tool", "tool_call_id": "c1", "content": "12"},
            chat_pb2.ChatMessage(role="tool", tool_call_id="c1", content=[text("12")]),
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
            chat_pb2.ChatMessage(role="assistant", content=[text("a")], reasoning="hm"),
        ),
        (
            {"role": "assistant", "refusal": "No."},
            chat_pb2.ChatMessage(role="assistant", content=[chat_pb2.ContentPart(refusal="No.")]),
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                    {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
                ],
            },
            chat_pb2.ChatMessage(
                role="user",
                content=[
                    chat_pb2.ContentPart(image=chat_pb2.Image(data=b"hi", mime_type="image/png")),
                    chat_pb2.ContentPart(image=chat_pb2.Image(uri="https://a/b.png")),
                ],
            ),
        ),
    ],
)
def test_a_message_as_openai_has_it_is_the_protocols(given, message):
    assert list(chat_of([given, message]).messages) == [message, message]


def test_a_message_of_another_client_is_what_it_dumps():
    """OpenAI's client answers with pydantic objects, which programs append to their messages."""

    class Function(BaseModel):
        name: str
        arguments: str

    class Call(BaseModel):
        id: str
        type: str
        function: Function

    class Message(BaseModel):
        role: str
        content: str | None = None
        annotations: list[str] = []
        audio: str | None = None
        tool_calls: list[Call]

    given = Message(role="assistant", tool_calls=[Call.model_validate(CALL)])
    assert chat_of([given]).messages[0].tool_calls[0].arguments == '{"x": 1}'


def test_tools_are_openais_or_the_protocols():
    ours = chat_pb2.Tool(name="g", parameters_schema="{}")
    strict = {"type": "function", "function": {"name": "h", "parameters": City, "strict": True}}
    tools = generate_request(USER, tools=[TOOL, ours, strict]).chat.tools
    # Models write properties in the schema's order.
    assert json.loads(tools[0].parameters_schema) == SCHEMA
    assert tools[0].parameters_schema.index('"z"') < tools[0].parameters_schema.index('"a"')
    assert (tools[0].name, tools[0].description, tools[1]) == ("f", "d", ours)
    assert json.loads(tools[2].parameters_schema) == City.model_json_schema()


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("auto", chat_pb2.ToolChoice(mode=chat_pb2.TOOL_MODE_AUTO)),
        ("none", chat_pb2.ToolChoice(mode=chat_pb2.TOOL_MODE_NONE)),
        ("required", chat_pb2.ToolChoice(mode=chat_pb2.TOOL_MODE_REQUIRED)),
        (
            {"type": "function", "function": {"name": "f"}},
            chat_pb2.ToolChoice(tool_name="f"),
        ),
        (chat_pb2.ToolChoice(tool_name="f"), chat_pb2.ToolChoice(tool_name="f")),
    ],
)
def test_a_choice_of_tools_is_openais_or_the_protocols(given, choice):
    assert generate_request(USER, tools=[TOOL], tool_choice=given).chat.tool_choice == choice


def test_other_options_of_chats_are_fields_of_chat():
    chat = generate_request(
        USER,
        parallel_tool_calls=False,
        add_generation_prompt=False,
        template_arguments={"enable_thinking": False, "list": [1, None, {"a": "b"}]},
    ).chat
    assert chat.HasField("parallel_tool_calls")
    assert not chat.parallel_tool_calls
    assert chat.HasField("add_generation_prompt")
    assert chat.template_arguments["enable_thinking"] is False
    assert list(chat.template_arguments["list"])[:2] == [1, None]
    whole = chat_pb2.Chat(messages=chat.messages)
    named = generate_request(whole, tools=[TOOL], chat_template_kwargs={"a": 1}).chat
    assert (named.tools[0].name, named.template_arguments["a"]) == ("f", 1)
    assert not whole.tools


SCHEMA_TEXT = json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, pb.Constraint(json_object={})),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            pb.Constraint(json_schema=SCHEMA_TEXT),
        ),
        (
            {"response_format": City},
            pb.Constraint(json_schema=json.dumps(City.model_json_schema())),
        ),
        ({"constraint": {"json_schema": SCHEMA}}, pb.Constraint(json_schema=SCHEMA_TEXT)),
        ({"constraint": {"json_schema": SCHEMA_TEXT}}, pb.Constraint(json_schema=SCHEMA_TEXT)),
        (
            {"constraint": {"json_schema": City}},
            pb.Constraint(json_schema=json.dumps(City.model_json_schema())),
        ),
        ({"constraint": {"json_object": True}}, pb.Constraint(json_object={})),
        ({"constraint": {"json_object": {}}}, pb.Constraint(json_object={})),
        ({"constraint": {"choice": ["a", "b"]}}, pb.Constraint(choice={"texts": ["a", "b"]})),
        ({"constraint": {"choice": {"texts": ["a"]}}}, pb.Constraint(choice={"texts": ["a"]})),
        ({"constraint": {"structural_tag": {"a": 1}}}, pb.Constraint(structural_tag='{"a": 1}')),
        ({"constraint": {"regex": "a+"}}, pb.Constraint(regex="a+")),
        ({"constraint": pb.Constraint(regex="a+")}, pb.Constraint(regex="a+")),
    ],
)
def test_a_format_and_a_schema_are_a_constraint(options, constraint):
    request = generate_request("x", **options)
    assert request == generate_request("x", **({"constraint": constraint} if constraint else {}))
    assert request.HasField("constraint") == (constraint is not None)


def test_openais_names_of_options_are_ours():
    theirs = generate_request(
        "x",
        stop="END",
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"12": -1},
        n=2,
        seed=7,
        presence_penalty=0.5,
        temperature=None,
        tools=None,
    )
    assert theirs == generate_request(
        "x",
        stop_sequences=["END"],
        max_new_tokens=3,
        return_logprobs=True,
        top_n_tokens=2,
        logit_bias={12: -1},
        n=2,
        seed=7,
        presence_penalty=0.5,
    )
    assert generate_request("x", max_completion_tokens=3).stopping.max_new_tokens == 3


PARTS = 'it must be {"type": "text", "text": ...}, {"type": "refusal"'
FORMS = 'it must be a text, a list of token ids, a Chat, or a list of messages, each {"role": ...'


@pytest.mark.parametrize(
    ("prompt", "options", "problem"),
    [
        (7, {}, f"prompt is 7: {FORMS}"),
        (b"x", {}, f"prompt is b'x': {FORMS}"),
        ({"role": "user"}, {}, f"prompt is {{'role': 'user'}}: {FORMS}"),
        (["hi"], {}, f"prompt is ['hi']: {FORMS}"),
        ([1, "a"], {}, f"prompt is [1, 'a']: {FORMS}"),
        ([5, -1], {}, "prompt[1] is -1: it must be a token id"),
        ("\ud800", {}, "prompt is '\\ud800': it must be a text without"),
        ([{"content": "x"}], {}, "messages[0] is {'content': 'x'}: it must be {\"role\": "),
        (
            [*USER, {"role": "user", "content": 7}],
            {},
            "messages[1].content is 7: it must be a text, a list of parts",
        ),
        ([{"role": "user", "content": [7]}], {}, f"messages[0].content[0] is 7: {PARTS}"),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            {},
            f"messages[0].content[0] is {{'type': 'input_audio'}}: {PARTS}",
        ),
        (
            [{"role": "user", "content": "x", "weight": 1}],
            {},
            "messages[0] has the key 'weight', which is not known: it must be",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            {},
            "messages[0].tool_calls[0].function.name is None: it must be a text",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}],
            {},
            "messages[0].content[0].image_url.url is 'data:x': it must be",
        ),
        ("x", {"tools": [TOOL]}, "tools is an option of chats: the prompt must be messages"),
        (USER, {"tools": TOOL}, "it must be a list of tools"),
        (USER, {"tools": ["f"]}, 'tools[0] is \'f\': it must be {"type": "function"'),
        (USER, {"tool_choice": "any"}, 'it must be "auto", "none", "required"'),
        (USER, {"tool_choice": 7}, "tool_choice is 7: it must be"),
        (USER, {"template_arguments": [1]}, "template_arguments is [1]: it must be a mapping"),
        (
            chat_pb2.Chat(tools=[chat_pb2.Tool(name="f")]),
            {"tools": [TOOL]},
            "tools is given twice: by itself and in the chat",
        ),
        ("x", {"response_format": "json"}, "response_format is 'json': it must be {\"type\":"),
        ("x", {"response_format": {"type": "xml"}}, '{"type": "json_object"}'),
        (
            "x",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema is {'name': 'n'}: it must be",
        ),
        (
            "x",
            {"response_format": {"type": "json_object"}, "constraint": {"regex": "a"}},
            "constraint is given twice: as response_format and as constraint",
        ),
        ("x", {"constraint": {"json_schema": 7}}, "constraint.json_schema is 7: it must be a JSON"),
        (
            "x",
            {"constraint": {"json_schema": {"a": {1}}}},
            "constraint.json_schema can't be written as JSON",
        ),
        ("x", {"constraint": {"regex": 3}}, "constraint.regex is 3: it must be a text"),
        ("x", {"constraint": {"a": 3}}, "constraint has the key 'a', which is not known"),
        ("x", {"constraint": {}}, "constraint is {}: it must be a mapping with one of json_schema"),
        ("x", {"top_k": "many"}, "top_k is 'many': it must be a whole number from 0 to 4294967295"),
        ("x", {"n": 2.5}, "n is 2.5: it must be a whole number"),
        ("x", {"stop_sequences": "END"}, "stop_sequences is 'END': it must be a list, each of it"),
        ("x", {"stop": [1]}, "stop_sequences is [1]: it must be a list, each of it a text"),
        ("x", {"logit_bias": [1]}, "logit_bias is [1]: it must be a mapping; each key a whole"),
        ("x", {"logprobs": 5}, "logprobs is 5: it must be True or False; top_logprobs says"),
        ("x", {"time_limit": "1s"}, "time_limit is '1s': it must be seconds as a number"),
        ("x", {"time_limit": 1e30}, "time_limit is 1e+30: it must be seconds as a number"),
        ("x", {"beam": {"w": 1}}, "it must be a mapping with fields of BeamSearch (width, "),
        ("x", {"stop": "a", "stop_sequences": ["b"]}, "stop_sequences is given twice: as stop and"),
    ],
)
def test_another_shape_is_refused_by_its_place_with_the_forms(prompt, options, problem):
    with pytest.raises(TypeError, match=re.escape(problem)) as caught:
        generate_request(prompt, **options)
    assert "\n" not in str(caught.value)


def test_tokens_are_of_texts_and_chats():
    assert tokenize_request("x").text == "x"
    assert tokenize_request(USER).chat == chat_of(USER)
    with pytest.raises(TypeError, match="it must be a text, a Chat"):
        tokenize_request([1])


def test_a_result_is_openais_turn_and_goes_back_as_it_is():
    turn = chat_pb2.ChatMessage(
        role="assistant",
        content=[text("Let me look.")],
        reasoning="hm",
        tool_calls=[chat_pb2.ToolCall(id="c1", name="f", arguments='{"x": 1}')],
    )
    finished = pb.Finished(
        text="Let me look.",
        reasoning="hm",
        message=turn,
        finish_reason=pb.FINISH_REASON_TOOL_CALLS,
    )
    usage = pb.Usage(prompt_token_count=3)
    answer = Answer(service.GenerateOnceResponse(results=[finished], usage=usage))
    assert answer.results == [Result(finished)]
    assert (answer.text, answer.reasoning) == ("Let me look.", "hm")
    assert (answer.tool_calls, answer.finish_reason) == ([CALL], "tool_calls")
    assert answer.usage.prompt_token_count == 3
    assert answer.message == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [CALL],
        "reasoning": "hm",
    }
    assert chat_of([answer.message]).messages[0] == turn


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (pb.FINISH_REASON_EOS_TOKEN, "stop"),
        (pb.FINISH_REASON_STOP_SEQUENCE, "stop"),
        (pb.FINISH_REASON_LENGTH, "length"),
        (pb.FINISH_REASON_TIME_LIMIT, "time_limit"),
        (pb.FINISH_REASON_CONSTRAINT, "constraint"),
        # Of a newer server.
        (77, "77"),
    ],
)
def test_why_a_sample_ended_is_a_word(reason, word):
    result = Result(pb.Finished(text="x", finish_reason=reason))
    assert result.finish_reason == word
    assert result.message == {"role": "assistant", "content": "x"}


def test_pieces_of_a_call_are_those_of_openais_streams():
    first = pb.ToolCallDelta(call_index=1, id="c1", name="f")
    assert piece_of(first) == {
        "index": 1,
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    more = pb.ToolCallDelta(call_index=1, arguments="{")
    assert piece_of(more) == {"index": 1, "function": {"arguments": "{"}}


def test_a_schema_comes_of_whatever_has_pydantics_method():
    made: Any = SimpleNamespace(model_json_schema=lambda: SCHEMA)
    assert generate_request("x", response_format=made).constraint.json_schema == SCHEMA_TEXT
