"""Stream a completion: python generate.py [HOST:PORT [PROMPT]]."""

import asyncio
import sys

import grpc

from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub


async def main(address: str = "127.0.0.1:50051", prompt: str = "def main():\n") -> None:
    request = pb.GenerateRequest(text=prompt, stopping=pb.StoppingOptions(max_new_tokens=32))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)
        async for event in stub.Generate(request, timeout=60):
            if event.HasField("tokens"):
                print(event.tokens.text, end="", flush=True)
            elif event.HasField("finished"):
                finished = event.finished
                reason = pb.FinishReason.Name(finished.reason)
                print(f"\n[{finished.generated_token_count} tokens; {reason}]")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
