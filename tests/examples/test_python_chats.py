"""Chats from Python, as in the examples, against a pod whose template shows tools."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import grpc
import pytest
from pydantic import BaseModel

from support.pods.harness import ServerProcess, serve
from support.texts import hostile
from tokenpod_client import AsyncClient, Client, ServerError
from tokenpod_client.chats import chat_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
TEMPLATE = """\
{%- if tools %}# tools: {{ tools | tojson }}
{% endif %}
{%- for m in messages %}# {{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}# assistant: {% endif %}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES = [{"role": "user", "content": "Does it rain?"}]


class Review(BaseModel):
    verdict: Literal["good", "bad"]


@pytest.fixture(scope="module")
def pod(tmp_path_factory) -> Iterator[ServerProcess]:
    folder = hostile.with_template(tmp_path_factory.mktemp("model") / "demo", TEMPLATE)
    with serve("--model-id", str(folder), "--tool-parser", "hermes") as running:
        yield running


@pytest.fixture
def client(pod) -> Iterator[Client]:
    with Client(pod.address, deadline=120) as client:
        yield client


def example(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, "-P", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_chat_example_holds_a_conversation(pod):
    said = example("chat.py", pod.address)
    assert said.count("[24 tokens; length]") == 2


def test_the_stream_example_shows_the_answer(pod, client):
    said = example("stream.py", pod.address)
    question = [{"role": "user", "content": "What is a stack?"}]
    whole = client.chat(question, max_tokens=24)
    assert "\n".join(said) == f"{whole.text}\n[24 tokens; length]"


def test_the_tools_example_reads_a_call(pod):
    assert example("tools.py", pod.address) == ["get_weather {'city': 'Paris'}", "[tool_calls]"]


def test_the_schema_example_reads_json(pod):
    (said,) = example("json_schema.py", pod.address)
    verdict, stars = said.split()
    assert verdict in ("good", "bad")
    assert 1 <= int(stars) <= 5


def test_the_agent_example_calls_a_tool_and_goes_on(pod):
    said = example("agent_turn.py", pod.address)
    assert said[0] in ('get_time {"city": "Tokyo"} -> 17:00', 'get_time {"city": "Paris"} -> 09:00')
    assert said[-1].startswith("[4 messages; ")


def test_a_streamed_call_adds_up_to_the_whole_one(client):
    options = {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 200}
    stream = client.generate(MESSAGES, **options)
    pieces = [delta.tool_call for delta in stream if delta.tool_call]
    (call,) = stream.answer().tool_calls
    assert pieces[0]["id"] == call["id"]
    assert pieces[0]["function"]["name"] == call["function"]["name"] == "get_weather"
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert arguments == call["function"]["arguments"]
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert stream.answer().finish_reason == "tool_calls"


def test_a_turn_goes_back_as_the_server_wrote_it(client):
    answer = client.chat(MESSAGES, tools=[TOOL], tool_choice=NAMED, max_tokens=200)
    sent = chat_of([answer.message]).messages[0]
    assert sent == answer.results[0].finished.message
    (call,) = answer.tool_calls
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
    after = [*MESSAGES, answer.message, result]
    more = client.chat(after, tools=[TOOL], max_tokens=5)
    # The template shows what came before.
    assert more.usage.prompt_token_count > answer.usage.prompt_token_count


async def test_a_pydantic_model_is_a_format(pod):
    async with AsyncClient(pod.address, deadline=120) as client:
        answer = await client.chat(MESSAGES, response_format=Review, max_tokens=200)
        assert Review.model_validate_json(answer.text).verdict in ("good", "bad")
        assert answer.finish_reason in ("stop", "constraint")
        stream = client.generate(MESSAGES, response_format=Review, max_tokens=200)
        assert (await stream.answer()).text == answer.text


def test_samples_log_probabilities_and_stops_are_openais(client):
    answer = client.chat(
        MESSAGES, n=2, seed=7, temperature=1, max_tokens=6, logprobs=True, top_logprobs=2
    )
    assert [result.sample_index for result in answer.results] == [0, 1]
    for result in answer.results:
        tokens = result.finished.tokens
        assert len(tokens.logprobs) == len(tokens.top_tokens) == 6
        assert len(tokens.top_tokens[0].token_ids) >= 2
    whole = client.chat(MESSAGES, max_tokens=6).text
    cut = client.chat(MESSAGES, max_tokens=6, stop=whole[3])
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(whole[3])], "stop")
    assert cut.results[0].finished.stop_sequence == whole[3]


def test_an_image_reaches_the_server_which_refuses_it_by_name(client):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    with pytest.raises(ServerError, match="content") as caught:
        client.chat([{"role": "user", "content": [{"type": "text", "text": "?"}, image]}])
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


def test_tokens_of_a_chat_are_those_of_its_prompt(client):
    ids = client.tokenize(MESSAGES)
    assert len(ids) == client.chat(MESSAGES, max_tokens=1).usage.prompt_token_count


def test_a_whole_answer_is_not_a_stream(client):
    with pytest.raises(TypeError, match="`generate` streams"):
        client.chat(MESSAGES, stream=True)
    with pytest.raises(TypeError, match="messages is 'hi': it must be a list of messages"):
        client.chat("hi")


def test_a_stream_that_was_closed_has_no_whole_answer(client):
    stream = client.generate(MESSAGES, max_tokens=200)
    next(stream)
    stream.close()
    with pytest.raises(RuntimeError, match="closed before its end"):
        stream.answer()
