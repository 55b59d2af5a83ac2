"""Stream a completion: python generate.py [HOST:PORT [PROMPT]]."""

import sys

from tokenpod_client import Client
from tokenpod_client.protos.tokenpod.v1.generation_pb2 import FinishReason


def main(address: str = "127.0.0.1:50051", prompt: str = "def main():\n") -> None:
    with Client(address, deadline=60) as client:
        stream = client.generate(prompt, max_new_tokens=32)
        for delta in stream:
            print(delta.text, end="", flush=True)
        finished = stream.finished[0]
        reason = FinishReason.Name(finished.finish_reason)
        print(f"\n[{finished.generated_token_count} tokens; {reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
