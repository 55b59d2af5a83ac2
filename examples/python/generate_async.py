"""Stream two completions at once: python generate_async.py [HOST:PORT [PROMPT]]."""

import asyncio
import sys

from tokenpod_client import AsyncClient
from tokenpod_client.protos.tokenpod.v1.generation_pb2 import FinishReason


async def complete(client: AsyncClient, prompt: str) -> str:
    text = ""
    async with client.generate(prompt, max_new_tokens=32) as stream:
        async for delta in stream:
            text += delta.text
    finished = stream.finished[0]
    reason = FinishReason.Name(finished.finish_reason)
    return f"{text}\n[{finished.generated_token_count} tokens; {reason}]"


async def main(address: str = "127.0.0.1:50051", prompt: str = "def main():\n") -> None:
    async with AsyncClient(address, deadline=60) as client:
        for answer in await asyncio.gather(complete(client, prompt), complete(client, prompt)):
            print(answer)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
