"""Let the model call a tool, and read the call: python tools.py [HOST:PORT].

The server must know how the model writes calls: by its template, or by `--tool-parser`.
"""

import json
import sys

from tokenpod_client import Client

CITIES = {"type": "string", "enum": ["Paris", "Rome"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Today's weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": CITIES},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def main(address: str = "127.0.0.1:50051") -> None:
    messages = [{"role": "user", "content": "Does it rain in Rome?"}]
    # "auto" lets the model decide, "required" makes it call one or more.
    choice = {"type": "function", "function": {"name": "get_weather"}}
    with Client(address, deadline=60) as client:
        answer = client.chat(messages, tools=TOOLS, tool_choice=choice, max_tokens=200)
    for call in answer.tool_calls:
        arguments = json.loads(call["function"]["arguments"])
        print(call["function"]["name"], arguments)
    print(f"[{answer.finish_reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
