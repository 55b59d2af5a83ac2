"""Client of Tokenpod, a text-generation server that speaks gRPC.

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("def main():", max_new_tokens=32):
            print(delta.text, end="")

        answer = client.chat([{"role": "user", "content": "Hello"}], max_tokens=32)
        print(answer.text, answer.tool_calls, answer.usage)

Prompts, tools, formats and options are taken as OpenAI's API has them, or as tokenpod.v1 does.
`AsyncClient` is the same for asyncio. `tokenpod_client.protos` has the messages and stubs of every
protocol that the server speaks, `tokenpod_client.cli` the commands.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenpod_client.aio import AsyncClient, AsyncStream
    from tokenpod_client.answers import Answer, Result, ToolCall, ToolCallPiece
    from tokenpod_client.chats import Message, SchemaModel, Tool, ToolChoice
    from tokenpod_client.embeddings import EmbedOptions, LabelScores, ReadOptions
    from tokenpod_client.errors import ServerError
    from tokenpod_client.reading import Delta
    from tokenpod_client.requests import GenerateOptions, Prompt
    from tokenpod_client.sync import Client, Stream

    __version__: str

_WHERE = {
    "Answer": "answers",
    "AsyncClient": "aio",
    "AsyncStream": "aio",
    "Client": "sync",
    "Delta": "reading",
    "EmbedOptions": "embeddings",
    "GenerateOptions": "requests",
    "LabelScores": "embeddings",
    "Message": "chats",
    "Prompt": "requests",
    "ReadOptions": "embeddings",
    "Result": "answers",
    "SchemaModel": "chats",
    "ServerError": "errors",
    "Stream": "sync",
    "Tool": "chats",
    "ToolCall": "answers",
    "ToolCallPiece": "answers",
    "ToolChoice": "chats",
}
__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Delta",
    "EmbedOptions",
    "GenerateOptions",
    "LabelScores",
    "Message",
    "Prompt",
    "ReadOptions",
    "Result",
    "SchemaModel",
    "ServerError",
    "Stream",
    "Tool",
    "ToolCall",
    "ToolCallPiece",
    "ToolChoice",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import what is used: grpc takes its time, and help does without it."""
    if name == "__version__":
        return import_module("importlib.metadata").version("tokenpod-client")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
