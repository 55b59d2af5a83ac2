"""Connections to the shard under test, and short ways to ask it for text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from router.client import ShardClient, ShardError
from router.records import Batch, CachedBatch, GeneratedText, Generation, Request, StepReply
from router.startup import RouterSettings
from router.wire import V3, WIRES, Wire

PROMPTS = ("def add(a, b):\n", "import os\n", "The quick brown fox", "class Queue:", "x = 1")

#: Small enough for any model and quick to warm up.
SMALL = RouterSettings(max_input_tokens=40, max_total_tokens=72, max_batch_prefill_tokens=80)


@pytest.fixture
async def shard(shard_address: str) -> AsyncIterator[ShardClient]:
    """A v3 connection to the shard, which holds no batch."""
    async for client in _connected(shard_address, V3()):
        yield client


@pytest.fixture(params=WIRES, ids=str)
async def any_shard(request: pytest.FixtureRequest, shard_address: str) -> Any:
    """A connection in each wire generation to the shard, which holds no batch."""
    async for client in _connected(shard_address, request.param):
        yield client


async def _connected(path: str, wire: Wire) -> AsyncIterator[ShardClient]:
    client = ShardClient(path, wire)
    await client.clear_cache()
    yield client
    await client.clear_cache()
    await client.close()


def ask(request_id: int = 0, text: str = PROMPTS[0], **wanted: Any) -> Request:
    """A greedy request for four tokens, unless `wanted` says otherwise."""
    defaults: dict[str, Any] = {"truncate": 100, "max_new_tokens": 4, "ignore_eos_token": True}
    return Request(id=request_id, inputs=text, **(defaults | wanted))


def batch_of(batch_id: int, *requests: Request) -> Batch:
    return Batch(batch_id, requests, max_tokens=sum(140 for _ in requests), max_blocks=1)


@dataclass
class Story:
    """All generations of one request, in order."""

    generations: list[Generation] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for each in self.generations if each.tokens for token in each.tokens.ids]

    @property
    def pieces(self) -> list[str]:
        return [text for each in self.generations if each.tokens for text in each.tokens.texts]

    @property
    def special(self) -> bool:
        return any(any(each.tokens.is_special) for each in self.generations if each.tokens)

    @property
    def end(self) -> GeneratedText:
        end = self.generations[-1].generated_text
        assert end is not None
        return end


async def finish(
    shard: ShardClient, reply: StepReply, others: Sequence[CachedBatch] = ()
) -> dict[int, Story]:
    """Decode what `reply` left, joined with `others`, to the end: the story of each request."""
    stories: dict[int, Story] = {}
    waiting = list(others)
    while True:
        for generation in reply.generations:
            stories.setdefault(generation.request_id, Story()).generations.append(generation)
        if reply.batch is None and not waiting:
            return stories
        batches = ([reply.batch] if reply.batch is not None else []) + waiting
        waiting = []
        reply = await shard.decode(batches)


async def tell(shard: ShardClient, request: Request, batch_id: int = 900) -> Story:
    """The story of `request` in a batch of its own."""
    return (await finish(shard, await shard.prefill(batch_of(batch_id, request))))[request.id]


async def prompt_ids(shard: ShardClient, text: str, **wanted: Any) -> tuple[int, ...]:
    """The tokens that the shard makes of a prompt, as its prefill log probabilities show them."""
    story = await tell(shard, ask(0, text, max_new_tokens=1, prefill_logprobs=True, **wanted))
    prefill = story.generations[0].prefill_tokens
    assert prefill is not None
    return prefill.ids


def cached(reply: StepReply) -> CachedBatch:
    """The batch of a reply that must have one."""
    assert reply.batch is not None, "no batch came back"
    return reply.batch


@contextmanager
def not_found(batch_id: int) -> Iterator[None]:
    """The call inside fails because the shard holds no batch of that id."""
    with pytest.raises(ShardError) as caught:
        yield
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert f"Batch ID {batch_id} not found in cache." in caught.value.message


async def assert_gone(shard: ShardClient, batch_id: int) -> None:
    """The shard holds no batch of that id; only Decode and a Prefill that joins it say so."""
    with not_found(batch_id):
        await shard.decode([CachedBatch(batch_id, (0,), 1, 1)])
