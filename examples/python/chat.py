"""Ask in a chat, and go on with the answer: python chat.py [HOST:PORT]."""

import sys

from tokenpod_client import Client, Message


def main(address: str = "127.0.0.1:50051") -> None:
    messages: list[Message] = [{"role": "system", "content": "You are brief."}]
    with Client(address, deadline=60) as client:
        for question in ("What is a stack?", "And a queue?"):
            messages.append({"role": "user", "content": question})
            answer = client.chat(messages, max_tokens=24, temperature=0)
            messages.append(answer.message)
            print(answer.text)
            count = answer.usage.generated_token_count
            print(f"[{count} tokens; {answer.finish_reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
