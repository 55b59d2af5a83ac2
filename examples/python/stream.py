"""Show a chat's answer as it comes: python stream.py [HOST:PORT [QUESTION]]."""

import sys

from tokenpod_client import Client


def main(address: str = "127.0.0.1:50051", question: str = "What is a stack?") -> None:
    messages = [{"role": "user", "content": question}]
    with Client(address, deadline=60) as client:
        stream = client.generate(messages, max_tokens=24, stop="\n\n\n")
        for delta in stream:
            # What a model thinks comes apart from what it answers, where the server can tell.
            print(delta.reasoning or delta.text, end="", flush=True)
        answer = stream.answer()
    print(f"\n[{answer.usage.generated_token_count} tokens; {answer.finish_reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
