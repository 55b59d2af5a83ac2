"""The double starts, refuses and panics where a stock router does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.client import ShardClient, ShardError
from router.double import Router
from router.fake_shard import FakeShard
from router.faults import RouterPanic, StartupError
from router.records import Image
from router.startup import RouterSettings, connect, warmup_batch
from router.wire import V1, V2, V3, Wire

EXPLICIT = RouterSettings(max_input_tokens=30, max_total_tokens=50, max_batch_prefill_tokens=70)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "shard-0")


def on(method: str, change: Callable[[Any], Any]) -> Callable[[str, Any], None]:
    """A tamper of one method's replies."""

    def tamper(name: str, reply: Any) -> None:
        if name == method:
            change(reply)

    return tamper


async def start(path: str, tamper: Any, settings: RouterSettings, wire: Wire | None = None) -> Any:
    async with FakeShard(path, tamper=tamper):
        router = await Router.start(path, wire=wire, settings=settings)
        await router.stop()
        return router


async def test_the_start_up_calls_come_in_order(path: str) -> None:
    seen: list[str] = []
    await start(path, lambda name, _: seen.append(name), EXPLICIT)
    assert seen == ["ServiceDiscovery", "ClearCache", "Info", "Warmup"]


async def test_no_shard_is_a_start_up_error(path: str) -> None:
    with pytest.raises(StartupError, match="unable to connect"):
        await Router.start(path)


async def test_a_block_size_of_0_divides_by_zero(path: str) -> None:
    with pytest.raises(RouterPanic, match="block_size"):
        await start(path, on("Info", lambda info: info.ClearField("block_size")), EXPLICIT)


async def test_v2_never_reads_the_block_size(path: str) -> None:
    tamper = on("Info", lambda info: info.ClearField("block_size"))
    router = await start(path, tamper, EXPLICIT, V2())
    assert router.info.block_size == 16


@pytest.mark.parametrize("field", ["max_input_tokens", "max_total_tokens"])
async def test_limits_that_are_not_echoed_panic(path: str, field: str) -> None:
    with pytest.raises(RouterPanic, match=f"{field} is 0"):
        await start(path, on("Warmup", lambda reply: reply.ClearField(field)), EXPLICIT)


async def test_no_limits_from_anyone_is_a_start_up_error(path: str) -> None:
    def forget(reply: Any) -> None:
        reply.ClearField("max_input_tokens")
        reply.ClearField("max_total_tokens")

    with pytest.raises(StartupError, match="it must be < max_total_tokens, 0"):
        await start(path, on("Warmup", forget), RouterSettings())


async def test_a_total_above_the_shards_budget_is_a_start_up_error(path: str) -> None:
    def little(reply: Any) -> None:
        reply.max_supported_total_tokens = 49

    with pytest.raises(StartupError, match="the shards fit 49"):
        await start(path, on("Warmup", little), EXPLICIT)


async def test_the_budget_is_the_shards_own(path: str) -> None:
    assert (await start(path, None, EXPLICIT)).limits.max_batch_total_tokens == 20_000


async def test_without_a_shards_budget_the_router_takes_16000(path: str) -> None:
    tamper = on("Warmup", lambda reply: reply.ClearField("max_supported_total_tokens"))
    assert (await start(path, tamper, EXPLICIT)).limits.max_batch_total_tokens == 16_000


async def test_a_prefill_budget_below_the_input_limit_needs_chunking(path: str) -> None:
    settings = RouterSettings(max_input_tokens=30, max_total_tokens=50, max_batch_prefill_tokens=20)
    with pytest.raises(StartupError, match="without chunking"):
        await start(path, None, settings)
    async with FakeShard(path, support_chunking=True):
        await (await Router.start(path, settings=settings)).stop()


def test_the_v3_warm_up_is_hostile() -> None:
    batch = warmup_batch(V3(), EXPLICIT)
    assert (batch.id, batch.max_tokens) == (0, 30)
    assert [each.id for each in batch.requests] == [0, 0, 0]
    assert [each.truncate for each in batch.requests] == [30, 30, 10]
    assert [each.max_new_tokens for each in batch.requests] == [20, 20, 40]
    first, second, last = batch.requests
    assert isinstance(first.chunks[-1], Image)
    assert first.inputs.startswith("_test _test ")
    assert "](data:image/jpeg;base64," in first.inputs
    assert second.chunks == ("_test " * 30,)
    assert last.inputs == "_test " * 10
    for each in batch.requests:
        assert each.sampling.watermark
        assert (each.top_n_tokens, each.prefill_logprobs, each.ignore_eos_token) == (20, True, True)


def test_the_v3_warm_up_without_limits_is_one_long_prompt() -> None:
    (request,) = warmup_batch(V3(), RouterSettings()).requests
    assert (request.truncate, request.max_new_tokens) == (4096, 1)


def test_older_warm_ups_repeat_the_text_to_the_input_limit() -> None:
    for wire, new in ((V1(), [2, 2, 2]), (V2(), [20, 20, 40])):
        batch = warmup_batch(wire, EXPLICIT)
        assert [each.max_new_tokens for each in batch.requests] == new
        assert batch.requests[2].inputs == "_test " * 30
        assert batch.max_tokens == 0
    assert "data:" in warmup_batch(V2(), EXPLICIT).requests[0].inputs
    assert "data:" not in warmup_batch(V1(), EXPLICIT).requests[0].inputs


def test_max_batch_size_ends_the_warm_up_batch() -> None:
    settings = RouterSettings(max_input_tokens=10, max_total_tokens=20, max_batch_size=2)
    assert len(warmup_batch(V3(), settings).requests) == 2


async def test_several_shards_agree_on_the_least_and_the_last_ones_info(tmp_path: Path) -> None:
    urls = tuple(f"unix://{tmp_path}/shard-{rank}" for rank in range(2))
    paths = [url.removeprefix("unix://") for url in urls]
    async with (
        FakeShard(paths[0], urls=urls, rank=0, capacity=700, block_size=4),
        FakeShard(paths[1], urls=urls, rank=1, capacity=800, block_size=2),
    ):
        router = await Router.start(paths[0], settings=EXPLICIT)
        assert router.limits.max_batch_total_tokens == 700
        assert router.info.block_size == 2
        await router.stop()


async def test_health_looks_at_the_last_shard_only(tmp_path: Path) -> None:
    urls = tuple(f"unix://{tmp_path}/shard-{rank}" for rank in range(2))
    paths = [url.removeprefix("unix://") for url in urls]
    async with FakeShard(paths[0], urls=urls), FakeShard(paths[1], urls=urls, rank=1) as last:
        shards = await connect(paths[0], V3())
        await shards.clients[0].close()
        shards.clients[0] = ShardClient(str(tmp_path / "dead"), V3())
        await shards.health()
        await last.__aexit__()
        with pytest.raises(ShardError):
            await shards.health()
        await shards.close()
