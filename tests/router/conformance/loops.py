"""Whole routers at work: many requests, hang-ups, restarts."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from router.client import ShardClient
from router.conformance.fixtures import PROMPTS, SMALL, ask, tell
from router.double import Router
from router.records import FinishReason, Sampling
from router.startup import RouterSettings
from router.streams import Prompt, Stream
from router.wire import V3, WIRES, Wire


async def tokenized(address: str) -> dict[str, tuple[int, ...]]:
    """Each prompt's tokens, as the router's own tokenizer would make them."""
    client = ShardClient(address, V3())
    ids = {text: await client.token_ids(text) for text in PROMPTS}
    await client.close()
    return ids


async def greedy(address: str, new: int) -> dict[str, list[int]]:
    """The first `new` greedy tokens of each prompt."""
    client = ShardClient(address, V3())
    ids = {text: (await tell(client, ask(0, text, max_new_tokens=new))).ids for text in PROMPTS}
    await client.close()
    return ids


@pytest.mark.parametrize(("seed", "wire"), [*enumerate(WIRES)], ids=str)
async def test_every_request_ends_once_with_its_tokens(
    shard_address: str, wire: Wire, seed: int
) -> None:
    """80 requests at a time of random lengths, a fifth of whose readers hang up."""
    rng = random.Random(seed)
    ids, expected = await tokenized(shard_address), await greedy(shard_address, 12)
    settings = replace(
        SMALL,
        waiting_served_ratio=rng.choice([0.0, 0.3, 1.2]),
        max_waiting_tokens=rng.choice([0, 3, 20]),
        max_batch_size=rng.choice([None, 5, 16]),
    )
    router = await Router.start(shard_address, wire=wire, settings=settings, seed=seed)
    await asyncio.gather(*(_user(router, rng, ids, expected) for _ in range(80)))
    assert await router.health()
    blocks = router.queue.allocator
    if blocks is not None:
        await router.idle()
        assert blocks.available == blocks.size
    await router.stop()


async def _user(
    router: Router,
    rng: random.Random,
    ids: dict[str, tuple[int, ...]],
    expected: dict[str, list[int]],
) -> None:
    text, new, sampled = rng.choice(PROMPTS), rng.randint(1, 12), rng.random() < 0.5
    leaves_after = rng.randint(0, new) if rng.random() < 0.2 else None
    await asyncio.sleep(rng.random() * 0.05)
    sampling = Sampling(do_sample=True, temperature=1.3) if sampled else Sampling()
    stream = router.submit(
        Prompt(
            text=text,
            input_length=len(ids[text]),
            ids=ids[text],
            max_new_tokens=new,
            sampling=sampling,
            ignore_eos_token=True,
            prefill_logprobs=rng.random() < 0.1,
            top_n_tokens=rng.choice([0, 0, 3]),
        )
    )
    if leaves_after is not None:
        await _leave_after(stream, leaves_after)
        return
    result = await stream.result()
    assert len(result.ids) == result.generated_tokens == new
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.seed is not None) == sampled
    if not sampled:
        assert list(result.ids) == expected[text][:new]


async def _leave_after(stream: Stream, tokens: int) -> None:
    seen = 0
    if tokens:
        async for _ in stream:
            seen += 1
            if seen == tokens:
                break
    stream.drop()


async def test_who_hangs_up_is_out_of_the_shard_two_steps_later(shard_address: str) -> None:
    """The router learns of it with the next token that it can't deliver, and filters at once."""
    ids = await tokenized(shard_address)
    router = await Router.start(shard_address, settings=SMALL)
    stays, leaves = (router.submit(_prompt(text, ids, 20)) for text in PROMPTS[:2])
    await _leave_after(leaves, 3)
    before = len(router.calls)
    assert len((await stays.result()).ids) == 20
    methods = [call.method for call in router.calls[before:]]
    assert methods.index("FilterBatch") <= 2
    after = router.calls[before + methods.index("FilterBatch") :]
    assert {call.size for call in after if call.method == "Decode"} == {1}
    await router.stop()


@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_a_router_that_was_killed_is_replaced_without_a_trace(
    shard_address: str, wire: Wire
) -> None:
    ids, expected = await tokenized(shard_address), await greedy(shard_address, 12)
    for tokens in (1, 4, 7):
        router = await Router.start(shard_address, wire=wire, settings=SMALL)
        streams = [router.submit(_prompt(text, ids, 12)) for text in PROMPTS]
        seen = 0
        async for _ in streams[0]:
            seen += 1
            if seen == tokens:
                break
        await router.stop()
    router = await Router.start(shard_address, wire=wire, settings=SMALL)
    results = await asyncio.gather(*(router.generate(_prompt(t, ids, 12)) for t in PROMPTS))
    assert [list(result.ids) for result in results] == [expected[text] for text in PROMPTS]
    assert router.calls[0].batch_ids == (0,)
    await router.stop()


@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_liveness_is_true_while_the_loop_runs(shard_address: str, wire: Wire) -> None:
    ids = await tokenized(shard_address)
    router = await Router.start(shard_address, wire=wire, settings=SMALL)
    stream = router.submit(_prompt(PROMPTS[0], ids, 20))
    for _ in range(4):
        router.healthy = False
        assert await router.health()
    router.healthy = True
    assert await router.health()
    assert len((await stream.result()).ids) == 20
    await router.stop()


async def test_default_limits_serve_requests_at_once(shard_address: str) -> None:
    ids, expected = await tokenized(shard_address), await greedy(shard_address, 12)
    router = await Router.start(shard_address, settings=RouterSettings())
    jobs = [router.generate(_prompt(text, ids, 12)) for text in PROMPTS * 4]
    results = await asyncio.gather(*jobs)
    assert [list(result.ids) for result in results] == [expected[text] for text in PROMPTS * 4]
    await router.stop()


def _prompt(text: str, ids: dict[str, tuple[int, ...]], new: int) -> Prompt:
    return Prompt(
        text=text,
        input_length=len(ids[text]),
        ids=ids[text],
        max_new_tokens=new,
        ignore_eos_token=True,
    )
