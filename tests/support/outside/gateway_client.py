"""OpenAI's own client against a gateway; run by a Python that has the package `openai`.

python gateway_client.py URL [tools]     prints one JSON object: what each kind of request answered
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPT = "def fibonacci(n):\n"
CHAT = [{"role": "user", "content": "Sum a list."}]
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 12}


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"q": {"enum": ["ab", "cd"]}}},
    },
}


def main(url: str, what: str = "texts") -> None:
    import openai  # type: ignore[import-not-found]

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    print(json.dumps({"texts": texts, "tools": tools}[what](client)))


def texts(client: Any) -> dict[str, Any]:
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY)
    parts = list(client.completions.create(prompt=PROMPT, stream=True, **GREEDY))
    said = list(client.chat.completions.create(messages=CHAT, stream=True, **GREEDY))
    return {
        "models": [model.id for model in client.models.list().data],
        "text": whole.choices[0].text,
        "finish": whole.choices[0].finish_reason,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": "".join(part.choices[0].text for part in parts if part.choices),
        "said": chat.choices[0].message.content,
        "logprobs": [token.logprob for token in chat.choices[0].logprobs.content],
        "said_streamed": "".join(p.choices[0].delta.content or "" for p in said if p.choices),
        "constraint": constrained(client),
        "stopped": stopped(client),
    }


def tools(client: Any) -> dict[str, Any]:
    """What becomes of a call that the model writes by itself, by `tool_choice`."""
    fields = {"model": "speaker", "temperature": 0, "messages": CHAT, "tools": [TOOL]}
    create = client.chat.completions.create
    told: dict[str, Any] = {}
    for choice in ("auto", None, "none"):
        given = fields | ({"tool_choice": choice} if choice else {})
        message = create(**given).choices[0].message
        told[str(choice)] = [message.content, calls(message.tool_calls)]
        parts = [p.choices[0] for p in create(stream=True, **given) if p.choices]
        text = "".join(part.delta.content or "" for part in parts)
        pieces = [call for part in parts for call in part.delta.tool_calls or []]
        told[f"{choice} streamed"] = [text, joined(pieces), parts[-1].finish_reason]
    first = create(**fields)
    answer = first.choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "3"}
    turn = create(**fields | {"messages": [*CHAT, answer, result]})
    told["prompt"] = first.usage.prompt_tokens
    return told | {"turn": [turn.choices[0].finish_reason, turn.usage.prompt_tokens]}


def calls(found: Any) -> list[list[str]]:
    return [[call.function.name, call.function.arguments] for call in found or []]


def joined(pieces: list[Any]) -> list[list[str]]:
    """Calls of the pieces in which they were streamed."""
    told: dict[int, list[str]] = {}
    for piece in pieces:
        call = told.setdefault(piece.index, ["", ""])
        call[0] += piece.function.name or ""
        call[1] += piece.function.arguments or ""
    return [told[index] for index in sorted(told)]


def constrained(client: Any) -> str:
    """What is said as JSON of a schema."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        messages=CHAT, response_format=form, **GREEDY | {"max_tokens": 60}
    )
    return str(answer.choices[0].message.content)


def stopped(client: Any) -> list[str]:
    answer = client.completions.create(prompt=PROMPT, stop=["("], **GREEDY)
    return [answer.choices[0].text, answer.choices[0].finish_reason]


if __name__ == "__main__":
    main(*sys.argv[1:])
