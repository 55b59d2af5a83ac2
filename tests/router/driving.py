"""A router that drives a fake shard, for the double's own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router import fake_model as model
from router.double import Router
from router.fake_shard import FakeShard
from router.startup import RouterSettings
from router.streams import Prompt, Stream
from router.validation import Tokenizer
from router.wire import V3, Wire

SETTINGS = RouterSettings(max_input_tokens=40, max_total_tokens=80, max_batch_prefill_tokens=80)


@asynccontextmanager
async def driven(
    path: Path,
    *,
    settings: RouterSettings = SETTINGS,
    wire: Wire | None = None,
    tokenizer: Tokenizer | None = None,
    **shard: Any,
) -> AsyncIterator[tuple[Router, FakeShard]]:
    """A router and the shard that it drives; `shard` are the shard's arguments."""
    async with FakeShard(str(path / "shard-0"), **shard) as fake:
        router = await Router.start(
            fake.path, wire=wire or V3(), settings=settings, tokenizer=tokenizer
        )
        yield router, fake
        await router.stop()


def tokenize(text: str) -> list[int]:
    """The fake model's tokens, as the router's own tokenizer would make them."""
    return model.encode(text, special=True)


def prompt(new: int | None = 4, text: str = "hello", **wanted: Any) -> Prompt:
    defaults: dict[str, Any] = {"ignore_eos_token": True}
    return Prompt(
        text=text, input_length=len(tokenize(text)), max_new_tokens=new, **(defaults | wanted)
    )


def greedy(text: str, count: int) -> tuple[int, ...]:
    """What the model says after `text`, computed past every shard."""
    tokens: list[int] = []
    context = model.digest(tokenize(text))
    for _ in range(count):
        tokens.append(model.CANDIDATES[model.choose(model.logits(context), 1.0, None, 0)])
        context = model.digest(tokens[-1:], context)
    return tuple(tokens)


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(map(model.piece, ids))


async def first_token(stream: Stream) -> None:
    async for _ in stream:
        return
