"""Chats with images at a running server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from PIL import Image

from support.clients.public_api import generate
from support.images.seeing import Seeing
from support.pods.harness import ServerProcess
from tokenpod_client.protos.tokenpod.v1 import chat_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

#: Tokens of an answer.
NEW = 8


def chat(*parts: str | bytes) -> chat_pb2.Chat:
    """One turn of these texts and images."""
    content = [
        chat_pb2.ContentPart(text=part)
        if isinstance(part, str)
        else chat_pb2.ContentPart(image=chat_pb2.Image(data=part))
        for part in parts
    ]
    return chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role="user", content=content)])


def asked(*parts: str | bytes, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=chat(*parts),
        sampling=pb.SamplingOptions(do_sample=False),
        stopping=pb.StoppingOptions(max_new_tokens=NEW, ignore_eos=True),
        **more,
    )


def truth(seeing: Seeing, *parts: str | Image.Image) -> list[int]:
    """What transformers says to the same."""
    texts = [p if isinstance(p, str) else seeing.shown(p) for p in parts]
    text = f"user: {''.join(texts)}\nassistant: "
    images = [part for part in parts if not isinstance(part, str)]
    ids = seeing.tokenizer.encode(text, add_special_tokens=False).ids
    return seeing.greedy(ids, images, NEW)


def said(stub: Any, *parts: str | bytes) -> list[int]:
    return generate(stub, asked(*parts)).samples[0].token_ids


def server_files(server: ServerProcess) -> Iterator[str]:
    """Memory of images that the front end holds."""
    for name in os.listdir(f"/proc/{server.process.pid}/fd"):
        try:
            target = os.readlink(f"/proc/{server.process.pid}/fd/{name}")
        except OSError:
            continue
        if "tokenpod-image" in target:
            yield target
