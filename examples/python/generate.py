"""Stream a completion: python generate.py [ADDRESS] [PROMPT]."""

import asyncio
import sys

import grpc

from tokenpod.protos.generate.v3 import generate_pb2 as pb
from tokenpod.protos.generate.v3 import generate_pb2_grpc as rpc


async def main(address: str = "localhost:50051", prompt: str = "import os\n\ndef ") -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        request = pb.GenerateRequest(text=prompt, stopping={"max_new_tokens": 32})
        async for event in rpc.TextGenerationServiceStub(channel).Generate(request, timeout=60):
            match event.WhichOneof("event"):
                case "tokens":
                    print(event.tokens.text, end="", flush=True)
                case "finished":
                    print(f"\n[{pb.Finish.Name(event.finished.reason)}]")


asyncio.run(main(*sys.argv[1:]))
