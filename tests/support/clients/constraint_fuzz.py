"""Odd constraints through a pod's `Generate`, and through `Prefill` beside innocent requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import grpc

from router.client import ShardClient
from router.conformance.fixtures import ask, batch_of, finish, tell
from router.records import GrammarType, Request, Sampling
from router.wire import V3
from support.clients.odd_constraints import odd_constraints, odd_schema
from tokenpod.service.calls.call import AskedConstraint, ConstraintKind
from tokenpod_client.protos.tokenpod.v1 import chat_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

#: What `Generate` may answer.
ALLOWED = {"OK", "INVALID_ARGUMENT"}
#: A router's request has ended beside innocent ones, whose texts were as ever.
ROUTED = "ended in a router's batch"
_AT_ONCE = 6
_CALL_SECONDS = 120.0
_FIELDS = {
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}
#: Kinds that routers know.
_ROUTED = {
    ConstraintKind.JSON_SCHEMA: GrammarType.JSON,
    ConstraintKind.REGEX: GrammarType.REGEX,
}
_MODE = chat_pb2.TOOL_MODE_REQUIRED
_INNOCENT = "def add(a, b):\n"


async def fuzz(address: str, socket: str | Path, seed: int, amount: int) -> Counter[str]:
    """Send so many; how they were answered: codes of `Generate`, and `ROUTED`.

    Args:
        address: of the pod's port.
        socket: where routers connect. The pod takes calls of tools (`--tool-parser`).
        seed: of the constraints, and of how they are sent.
        amount: a quarter of them goes through `Prefill`, some as schemas of tools.
    """
    answers: Counter[str] = Counter()
    odd = list(odd_constraints(seed, amount))
    routed = [each for each in odd if each.kind in _ROUTED][: amount // 4]
    taken = {*map(id, routed)}
    chance = random.Random(seed)
    requests = iter([_request(each, chance) for each in odd if id(each) not in taken])
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)
        lanes = [_generate(stub, requests, answers) for _ in range(_AT_ONCE)]
        await asyncio.gather(*lanes, _route(str(socket), routed, chance, answers))
    return answers


async def _generate(
    stub: Any, requests: Iterator[pb.GenerateRequest], answers: Counter[str]
) -> None:
    for request in requests:
        try:
            async for _ in stub.Generate(request, timeout=_CALL_SECONDS):
                pass
            answers["OK"] += 1
        except grpc.aio.AioRpcError as error:
            answers[error.code().name] += 1


def _request(asked: AskedConstraint, chance: random.Random) -> pb.GenerateRequest:
    stopping = {"max_new_tokens": chance.choice([1, 3, 8])}
    if chance.random() < 0.1:
        messages = [{"role": "user", "content": [{"text": "x"}]}]
        tools = [{"name": "f", "parameters_schema": odd_schema(chance)}]
        chat = {"messages": messages, "tools": tools, "tool_choice": {"mode": _MODE}}
        return pb.GenerateRequest(chat=chat, stopping=stopping)
    sampling = {"temperature": 5.0, "seed": chance.randrange(99)} if chance.random() < 0.5 else {}
    constraint = {_FIELDS[asked.kind]: asked.text}
    return pb.GenerateRequest(
        text=_INNOCENT, constraint=constraint, stopping=stopping, sampling=sampling
    )


async def _route(
    socket: str, odd: Sequence[AskedConstraint], chance: random.Random, answers: Counter[str]
) -> None:
    """Batches with one or two odd requests, which are in them from the start or join them."""
    shard, left = ShardClient(socket, V3()), iter(odd)
    try:
        alone = (await tell(shard, ask(0, _INNOCENT, max_new_tokens=6))).ids
        number = 0
        while some := list(islice(left, chance.choice([1, 1, 2]))):
            number += 2
            innocent = ask(0, _INNOCENT, max_new_tokens=6)
            others = [_asked(at, each, chance) for at, each in enumerate(some, 1)]
            if chance.random() < 0.5:
                reply = await shard.prefill(batch_of(number, innocent, *others))
                stories = await finish(shard, reply)
                ids = stories[0].ids
            else:
                first = await shard.prefill(batch_of(number, innocent))
                reply = await shard.prefill(batch_of(number + 1, *others), first.batch)
                stories = await finish(shard, reply)
                ids = [*_ids(first), *stories[0].ids]
            assert ids == alone, f"an innocent request has {ids}, not {alone}"
            assert {*stories} == {0, *range(1, len(some) + 1)}
            assert all(story.end for story in stories.values())
            answers[ROUTED] += len(some)
    finally:
        await shard.clear_cache()
        await shard.close()


def _ids(reply: Any) -> list[int]:
    (generation,) = reply.generations
    return list(generation.tokens.ids)


def _asked(number: int, odd: AskedConstraint, chance: random.Random) -> Request:
    sampling = Sampling(grammar=odd.text, grammar_type=_ROUTED[odd.kind])
    ignored = chance.random() < 0.5
    return ask(number, "x = ", sampling=sampling, ignore_eos_token=ignored)
