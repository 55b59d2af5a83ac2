"""What a failed call does to requests, batches and `/health`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.batching import Call
from router.client import ShardClient, ShardError
from router.conformance.fixtures import ask, batch_of
from router.driving import driven, first_token, greedy, prompt
from router.fake_batches import Refused
from router.fake_shard import FakeShard
from router.records import LIVENESS_ID
from router.streams import GenerationError
from router.wire import V1, V2, V3, Wire


def failing(method: str, when: Callable[[Any], bool] = lambda _: True) -> Callable[..., None]:
    """A tamper that lets such calls fail."""

    def tamper(name: str, reply: Any) -> None:
        if name == method and when(reply):
            raise Refused(grpc.StatusCode.INTERNAL, "no luck")

    return tamper


def joins(reply: Any) -> bool:
    return bool(reply.concat_ns)


async def test_a_failed_prefill_fails_its_batch_and_clears_it(tmp_path: Path) -> None:
    tamper = failing("Prefill", lambda reply: reply.batch.id == 1)
    async with driven(tmp_path, tamper=tamper) as (router, fake):
        running = router.submit(prompt(12))
        await first_token(running)
        with pytest.raises(GenerationError, match="no luck"):
            await router.generate(prompt(4))
        assert (await running.result()).ids == greedy("hello", 12)
        assert ("ClearCache", (1,)) in fake.calls


async def test_a_failed_decode_fails_all_and_clears_each_batch(tmp_path: Path) -> None:
    async with driven(tmp_path, tamper=failing("Decode", joins)) as (router, _):
        running = router.submit(prompt(12))
        await first_token(running)
        late = router.submit(prompt(12))
        for stream in (running, late):
            with pytest.raises(GenerationError, match="no luck"):
                await stream.result()
        await router.idle()
        assert router.calls[-2:] == [Call("ClearCache", (0,)), Call("ClearCache", (1,))]
        assert len((await router.generate(prompt(3))).ids) == 3


async def test_a_failed_join_with_chunking_fails_all_and_clears_the_new_batch_only(
    tmp_path: Path,
) -> None:
    failed = False

    def tamper(name: str, reply: Any) -> None:
        nonlocal failed
        failed = failed or (name == "Prefill" and joins(reply))
        if failed and name in ("Prefill", "ClearCache"):
            raise Refused(grpc.StatusCode.INTERNAL, "no luck")

    async with driven(tmp_path, support_chunking=True, tamper=tamper) as (router, fake):
        running = router.submit(prompt(30))
        await first_token(running)
        late = router.submit(prompt(4))
        for stream in (running, late):
            with pytest.raises(GenerationError, match="no luck"):
                await stream.result()
        await router.idle()
        # The answer to this ClearCache is an error too, which a router ignores.
        assert router.calls[-2:] == [Call("Prefill", (0, 1), 1), Call("ClearCache", (1,))]
        assert fake.batches == {}


@pytest.mark.parametrize("wire", [V2(), V3()], ids=str)
async def test_a_failed_step_frees_the_books(tmp_path: Path, wire: Wire) -> None:
    async with driven(tmp_path, wire=wire, tamper=failing("Decode")) as (router, _):
        for _ in range(3):
            with pytest.raises(GenerationError):
                await router.generate(prompt(12))
        await router.idle()
        book = router.queue.allocator
        assert book is None or book.available == book.size


async def test_an_answer_over_4_mib_fails_the_step(tmp_path: Path) -> None:
    def bloat(name: str, reply: Any) -> None:
        if name == "Decode":
            reply.generations[0].tokens.texts[0] = "x" * (4 * 1024 * 1024)

    async with driven(tmp_path, tamper=bloat) as (router, _):
        with pytest.raises(GenerationError, match="larger than max"):
            await router.generate(prompt(4))


# --- health -----------------------------------------------------------------------------------


async def test_after_a_failure_that_a_client_read_health_is_a_prefill(tmp_path: Path) -> None:
    async with driven(tmp_path, tamper=failing("Decode")) as (router, fake):
        with pytest.raises(GenerationError):
            await router.generate(prompt(4))
        # A generation does not restore the trust; an answered probe does.
        await router.generate(prompt(1))
        assert await router.health()
        assert fake.calls[-1] == ("Prefill", (LIVENESS_ID,))
        calls = len(fake.calls)
        assert await router.health()
        assert len(fake.calls) == calls, "the second is a Health rpc"


async def test_a_failure_that_nobody_read_of_changes_nothing(tmp_path: Path) -> None:
    async with driven(tmp_path, tamper=failing("Decode")) as (router, _):
        stream = router.submit(prompt(4))
        stream.drop()
        await router.idle()
        assert router.healthy


async def test_health_is_false_while_the_shard_is_gone(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, fake):
        await fake.kill()
        assert [await router.health() for _ in range(2)] == [False, False]


async def test_a_shard_that_is_back_is_called_at_once(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, fake):
        await fake.kill()
        with pytest.raises(GenerationError):
            await router.generate(prompt(4))
        async with FakeShard(fake.path):
            assert (await router.generate(prompt(4))).ids == greedy("hello", 4)


async def test_the_probe_does_not_wait_for_the_queue(tmp_path: Path) -> None:
    async with driven(tmp_path, rows=1) as (router, fake):
        leave = fake.rows.occupy(1)
        stream = router.submit(prompt(4))
        await router.probe()
        assert not stream.received
        leave()
        assert (await stream.result()).ids == greedy("hello", 4)


async def test_a_v1_router_trusts_no_shard_before_its_first_token(tmp_path: Path) -> None:
    async with driven(tmp_path, wire=V1()) as (router, fake):
        assert await router.health()
        assert fake.calls[-1] == ("Prefill", (LIVENESS_ID,))
        await router.generate(prompt(1))
        assert router.healthy


async def test_replies_over_4_mib_are_an_error(tmp_path: Path) -> None:
    def bloat(name: str, reply: Any) -> None:
        if name == "Prefill":
            reply.generations[0].tokens.texts[0] = "x" * (4 * 1024 * 1024)

    path = str(tmp_path / "shard-0")
    async with FakeShard(path, tamper=bloat):
        client = ShardClient(path, V3())
        with pytest.raises(ShardError) as caught:
            await client.prefill(batch_of(0, ask(0)))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await client.close()
