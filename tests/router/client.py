"""Calls to one shard, and the fan-out to several, as a router makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from router.records import Batch, CachedBatch, ShardInfo, StepReply, WarmupReply
from router.wire import Wire

T = TypeVar("T")

#: tonic's default limit for messages that it receives, in bytes. Sending is unlimited.
RECEIVE_LIMIT = 4 * 1024 * 1024

CHANNEL_OPTIONS = (
    # Routers name this authority whatever the socket.
    ("grpc.default_authority", "[::]:50051"),
    ("grpc.max_receive_message_length", RECEIVE_LIMIT),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    # Each connection is its own: a restarted router must not find its predecessor's channel.
    ("grpc.use_local_subchannel_pool", 1),
)


class ShardError(Exception):
    """A call ended with a status other than OK. Routers read `message` only."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class ShardClient:
    """One connection to one shard over its unix socket: no TLS, no deadlines, no retries."""

    def __init__(self, path: str, wire: Wire) -> None:
        self.path = path
        self.wire = wire
        self._channels: list[grpc.aio.Channel] = []
        self._closed = False
        self._connect()

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def service_discovery(self) -> list[str]:
        """The shards' socket paths, less the prefix `unix://`."""
        reply = await self._call("ServiceDiscovery", self.wire.pb.ServiceDiscoveryRequest())
        return [url.removeprefix("unix://") for url in reply.urls]

    async def info(self) -> ShardInfo:
        return self.wire.read_info(await self._call("Info", self.wire.pb.InfoRequest()))

    async def health(self) -> None:
        await self._call("Health", self.wire.pb.HealthRequest())

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._call("ClearCache", self.wire.pb.ClearCacheRequest(id=batch_id))

    async def warmup(
        self, batch: Batch, max_input: int | None, max_prefill: int, max_total: int | None
    ) -> WarmupReply:
        request = self.wire.warmup_request(batch, max_input, max_prefill, max_total)
        return self.wire.read_warmup(await self._call("Warmup", request))

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepReply:
        request = self.wire.prefill_request(batch, cached)
        return self.wire.read_step(await self._call("Prefill", request))

    async def decode(self, batches: Sequence[CachedBatch]) -> StepReply:
        request = self.wire.pb.DecodeRequest(
            batches=[self.wire.cached_batch(each) for each in batches]
        )
        return self.wire.read_step(await self._call("Decode", request))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch | None:
        request = self.wire.pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids)
        reply = await self._call("FilterBatch", request)
        return self.wire.read_cached_batch(reply.batch) if reply.HasField("batch") else None

    async def tokens(self, text: str) -> int:
        """How many tokens `text` has; v1's fork and v3 have this rpc, no router calls it."""
        return int((await self._call("Tokens", self.wire.pb.TokensRequest(text=text))).ntokens)

    async def token_ids(self, text: str) -> tuple[int, ...]:
        """The tokens of `text`; v3 only."""
        request = self.wire.pb.TokensRequest(text=text, return_ids=True)
        return tuple((await self._call("Tokens", request)).ids)

    def _connect(self) -> None:
        channel = grpc.aio.insecure_channel(f"unix:{self.path}", options=CHANNEL_OPTIONS)
        self._channels.append(channel)
        self._stub = self.wire.stub(channel)

    async def _call(self, method: str, request: Any) -> Any:
        # tonic connects anew for each call after a failure; this library would wait a while.
        if self._channels[-1].get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            self._connect()
        try:
            return await getattr(self._stub, method)(request)
        except grpc.aio.AioRpcError as error:
            raise ShardError(error.code(), error.details() or "") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                # The call was cancelled with its channel, not its caller.
                raise ShardError(grpc.StatusCode.CANCELLED, "the connection is closed") from None
            raise


class Shards:
    """All shards of a model; every call goes to all of them at once and waits for all.

    The *last* shard's answer counts where answers can't be joined: its batch, its Info, its Health
    and its FilterBatch.
    """

    def __init__(self, clients: Sequence[ShardClient]) -> None:
        self.clients = list(clients)

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))

    async def info(self) -> ShardInfo:
        return await self._last(lambda client: client.info())

    async def health(self) -> None:
        await self._last(lambda client: client.health())

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._all(lambda client: client.clear_cache(batch_id))

    async def warmup(
        self, batch: Batch, max_input: int | None, max_prefill: int, max_total: int | None
    ) -> WarmupReply:
        return min(
            await self._all(lambda each: each.warmup(batch, max_input, max_prefill, max_total))
        )

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepReply:
        return _joined(await self._all(lambda client: client.prefill(batch, cached)))

    async def decode(self, batches: Sequence[CachedBatch]) -> StepReply:
        return _joined(await self._all(lambda client: client.decode(batches)))

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch | None:
        return await self._last(lambda client: client.filter_batch(batch_id, request_ids))

    async def _all(self, call: Callable[[ShardClient], Awaitable[T]]) -> list[T]:
        """Every shard's answer; the first error where there is one."""
        return [_answer(outcome) for outcome in await self._outcomes(call)]

    async def _last(self, call: Callable[[ShardClient], Awaitable[T]]) -> T:
        """The last shard's answer; the others' errors are dropped."""
        return _answer((await self._outcomes(call))[-1])

    async def _outcomes(
        self, call: Callable[[ShardClient], Awaitable[T]]
    ) -> list[T | BaseException]:
        return await asyncio.gather(
            *(call(client) for client in self.clients), return_exceptions=True
        )


def _answer(outcome: T | BaseException) -> T:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _joined(replies: Sequence[StepReply]) -> StepReply:
    slowest = max(replies, key=lambda reply: reply.total_ns)
    return StepReply(
        generations=tuple(each for reply in replies for each in reply.generations),
        batch=replies[-1].batch,
        forward_ns=slowest.forward_ns,
        decode_ns=slowest.decode_ns,
        total_ns=slowest.total_ns,
        concat_ns=slowest.concat_ns,
    )
