"""OpenAI's own client against a gateway; run by a Python that has the package `openai`.

python gateway_client.py URL      prints one JSON object: what each kind of request answered
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPT = "def fibonacci(n):\n"
CHAT = [{"role": "user", "content": "Sum a list."}]
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 12}


def main(url: str) -> None:
    import openai  # type: ignore[import-not-found]

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY)
    parts = list(client.completions.create(prompt=PROMPT, stream=True, **GREEDY))
    said = list(client.chat.completions.create(messages=CHAT, stream=True, **GREEDY))
    told = {
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
    print(json.dumps(told))


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
