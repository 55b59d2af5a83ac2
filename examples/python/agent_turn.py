"""A turn of an agent: the model calls tools until it answers: python agent_turn.py [HOST:PORT].

The server must know how the model writes calls: by its template, or by `--tool-parser`.
"""

import asyncio
import json
import sys

from tokenpod_client import AsyncClient, Message, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time of day in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Tokyo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
TIMES = {"Paris": "09:00", "Tokyo": "17:00"}
#: A model that calls on and on is left here.
MOST_MESSAGES = 20


async def get_time(city: str) -> str:
    return TIMES[city]


async def run(call: ToolCall) -> Message:
    """The message that answers a call."""
    try:
        result = await get_time(**json.loads(call["function"]["arguments"]))
    except (ValueError, TypeError, KeyError) as error:
        # The model may do better when it reads what was wrong.
        result = f"error: {error}"
    print(f"{call['function']['name']} {call['function']['arguments']} -> {result}")
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


async def main(address: str = "127.0.0.1:50051") -> None:
    messages: list[Message] = [{"role": "user", "content": "What time is it in Tokyo?"}]
    # The first answer must look it up; later ones may.
    first = {"type": "function", "function": {"name": "get_time"}}
    async with AsyncClient(address, deadline=60) as client:
        answer = await client.chat(messages, tools=TOOLS, tool_choice=first, max_tokens=200)
        messages.append(answer.message)
        while answer.tool_calls and len(messages) < MOST_MESSAGES:
            messages += await asyncio.gather(*map(run, answer.tool_calls))
            answer = await client.chat(messages, tools=TOOLS, max_tokens=24)
            messages.append(answer.message)
    print(f"{answer.text}\n[{len(messages)} messages; {answer.finish_reason}]")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
