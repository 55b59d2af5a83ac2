"""Generate JSON of a schema: python json_schema.py [HOST:PORT].

A pydantic model does in the schema's place: `response_format=Review`, and then
`Review.model_validate_json(answer.text)`.
"""

import json
import sys

from tokenpod_client import Client

SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"type": "string", "enum": ["good", "bad"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["verdict", "stars"],
    "additionalProperties": False,
}


def main(address: str = "127.0.0.1:50051") -> None:
    messages = [{"role": "user", "content": "Review this film as JSON: I liked it."}]
    wanted = {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA}}
    with Client(address, deadline=60) as client:
        answer = client.chat(messages, response_format=wanted, max_tokens=200)
    review = json.loads(answer.text)
    print(review["verdict"], review["stars"])


if __name__ == "__main__":
    main(*sys.argv[1:])
