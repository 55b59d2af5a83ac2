"""The prefix cache for gateways: its changes, with the load, and how to empty it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2 as common

from tokenpod.core.messages import BLOCK_TOKENS, BlocksRemoved, BlocksStored, CacheEvents
from tokenpod.service.calls.errors import FailedPrecondition, InvalidArgument
from tokenpod.service.dialects.vllm.model import hit_rate, used_tokens
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.serving import Serving

#: Seconds between two records of the load while nothing changes in the cache.
_HEARTBEAT_SECONDS = 1.0
#: Blocks in one message: 150 kB.
_BLOCKS_AT_ONCE = 2048
_MOST_WAIT_SECONDS = 600.0
#: Numbers of messages and of events must fit into 64 bits; a message has fewer events than 2^16.
_MOST_NUMBER = 1 << 47
_LOOK_SECONDS = 0.05


async def subscribe(
    backend: Backend, request: common.SubscribeKvEventsRequest, context: Context
) -> None:
    """Write what the cache holds, then each change, and the load with it and now and then.

    Whoever comes back with a number hears of the whole cache again, which takes the place of what
    it knew; its numbers go on.
    """
    serving = _switched_on(backend)
    number = request.start_sequence_number
    if number >= _MOST_NUMBER:
        raise InvalidArgument("start_sequence_number", f"is {number}; must be below {_MOST_NUMBER}")
    early = request.load_records_before_first_batch
    sample = 0
    with serving.cache.listen() as listener:
        while True:
            events = await listener.next(_HEARTBEAT_SECONDS)
            if events is None:
                if not (number or early):
                    continue
                sample += 1
                record = _load(serving, sample, alone=True)
                await context.write(_batch(number, [], record))
                continue
            for changes in _cut(events):
                number, sample = number + 1, sample + 1
                await context.write(_batch(number, changes, _load(serving, sample)))


async def flush_cache(
    backend: Backend, request: common.FlushCacheRequest, context: Context
) -> common.FlushCacheResponse:
    """Empty the cache once no call is under way, if that comes soon enough."""
    seconds = request.timeout_s
    if not 0 <= seconds <= _MOST_WAIT_SECONDS:
        problem = f"is {seconds:g}; must be from 0 to {_MOST_WAIT_SECONDS:g}"
        raise InvalidArgument("timeout_s", problem)
    serving = _switched_on(backend)
    counters, client = backend.admission.counters, serving.client
    until = time.monotonic() + seconds
    # Routers' requests are no calls, and calls that tokenise are not in the engine yet.
    while busy := max(counters.requests, client.load.running + client.load.waiting):
        if time.monotonic() >= until:
            message = f"requests under way: {busy}"
            return common.FlushCacheResponse(success=False, message=message)
        await asyncio.sleep(_LOOK_SECONDS)
    serving.cache.flush()
    return common.FlushCacheResponse(success=True)


# -- parts -------------------------------------------------------------------------------------


def _switched_on(backend: Backend) -> Serving:
    """Raise FailedPrecondition unless the operator lets clients hear of others' prompts."""
    serving = backend.generate.serving
    if not serving.settings.kv_cache_events:
        raise FailedPrecondition("this server is started without --kv-cache-events")
    return serving


def _cut(events: CacheEvents) -> Iterator[list[common.KvCacheEvent]]:
    """The changes in order, in messages of a size that every client takes."""
    batch: list[common.KvCacheEvent] = []
    blocks = 0
    if events.cleared:
        batch.append(common.KvCacheEvent(cleared=common.KvCacheCleared()))
    for change in events.changes:
        for at in range(0, len(change.hashes), _BLOCKS_AT_ONCE):
            hashes = change.hashes[at : at + _BLOCKS_AT_ONCE]
            if blocks + len(hashes) > _BLOCKS_AT_ONCE:
                yield batch
                batch, blocks = [], 0
            batch.append(_event(change, at, hashes))
            blocks += len(hashes)
    yield batch


def _event(change: BlocksStored | BlocksRemoved, at: int, hashes: list[int]) -> common.KvCacheEvent:
    """A change's blocks from `at` on."""
    event = common.KvCacheEvent()
    if isinstance(change, BlocksRemoved):
        event.removed.block_hashes.extend(hashes)
        return event
    stored = event.stored
    parent = change.hashes[at - 1] if at else change.parent
    if parent is not None:
        stored.parent_block_hash = parent
    for index, each in enumerate(hashes, start=at):
        tokens = change.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
        stored.blocks.add(block_hash=each, token_ids=tokens, block_size=BLOCK_TOKENS)
    return event


def _batch(
    number: int, events: list[common.KvCacheEvent], load: common.EngineLoad
) -> common.KvEventBatch:
    """A message; its events are numbered by their place in the stream."""
    for at, event in enumerate(events):
        event.event_id = (number << 16) + at
    return common.KvEventBatch(
        sequence_number=number, timestamp=time.time(), events=events, dp_rank=0, load=load
    )


def _load(serving: Serving, sample: int, *, alone: bool = False) -> common.EngineLoad:
    """The load; with `alone` it comes without events, and says more."""
    load, slots, used = serving.client.load, serving.ready.slots, used_tokens(serving)
    record = common.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_uncached_tokens=load.waiting_tokens,
        token_usage=used / slots,
        active_token_usage=used / slots,
        max_running_requests=serving.limits.rows,
        sample=sample,
        load_only=alone,
    )
    if alone:
        record.cache_hit_rate = hit_rate(serving)
        record.num_used_tokens = used
        record.max_total_num_tokens = slots
    return record
