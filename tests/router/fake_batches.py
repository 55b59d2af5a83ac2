"""The fake shard's batches: what Prefill, Decode, FilterBatch and ClearCache do to them.

What one request asks for never fails a call: it is served, it waits for a row, or it ends alone.
A call that fails releases every batch that it named, because routers clear only some of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from router.fake_rows import Rows
from router.fake_sequence import Sequence as Request
from router.records import LIVENESS_ID
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb


class Refused(Exception):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Batches:
    """Batches by id.

    Args:
        rows: who may run.
        max_total_tokens: the longest prompt with its output.
        lease: seconds that a batch is kept without a call that names it.
    """

    def __init__(self, rows: Rows, *, max_total_tokens: int, lease: float) -> None:
        self.held: dict[int, list[Request]] = {}
        self.rows = rows
        #: What Warmup agreed to. A shard that was restarted under a living router hears no Warmup,
        #: and must keep joins away all the same.
        self.max_prefill_tokens = 2**32 - 1
        self._max_total_tokens = max_total_tokens
        self._lease = lease
        self._named_at: dict[int, float] = {}
        #: Batches that a call waits with.
        self._in_use: set[int] = set()
        self._draining = False
        self._closed = False

    # --- calls --------------------------------------------------------------------------------

    def prefill(self, request: Any) -> Any:
        """Never waits: what finds no row is answered without a generation."""
        batch, reply = request.batch, pb.PrefillResponse()
        joined = request.HasField("cached_batch")
        named = [request.cached_batch.id] if joined else []
        self._check_open([*named, batch.id])
        if not batch.requests:
            self.release(named)
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "batch.requests is empty")
        if _is_liveness(batch):
            (probe,) = map(Request, batch.requests)
            reply.generations.append(probe.advance(len(probe.prompt)))
            return reply
        self.release([batch.id])
        served: list[Request] = []
        for each in map(Request, batch.requests):
            if each.unservable(self._max_total_tokens):
                reply.generations.append(each.ended_alone())
            else:
                served.append(each)
        total = sum(each.bound for each in served)
        if total > self.rows.slots:
            self.release(named)
            message = f"{total} tokens of KV cache would be needed; there are {self.rows.slots}"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        cached = self._take(named)
        self.rows.queue(served)
        return self._step(reply, (named or [batch.id])[0], cached + served, joined)

    async def decode(self, request: Any) -> Any:
        """Waits while it can step nobody: an empty answer would make the router spin."""
        ids = [batch.id for batch in request.batches]
        if not ids:
            message = "Must provide at least one batch"
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
        while True:
            self._check_open(ids)
            self._check_known(ids)
            self.rows.admit()
            sequences = [each for batch_id in ids for each in self.held[batch_id]]
            if any(each.has_row for each in sequences) or all(each.stopped for each in sequences):
                break
            self._in_use |= set(ids)
            try:
                await self.rows.change()
            finally:
                self._in_use -= set(ids)
                self._name(ids)
        return self._step(pb.DecodeResponse(), ids[0], self._take(ids), len(ids) > 1)

    def filter(self, batch_id: int, request_ids: Sequence[int]) -> Any:
        """What is left of a batch; no batch when it is unknown or nothing is left."""
        keep = set(request_ids)
        sequences = self.held.pop(batch_id, [])
        kept = [each for each in sequences if each.request.id in keep]
        self.rows.release(each for each in sequences if each.request.id not in keep)
        reply = pb.FilterBatchResponse()
        if kept:
            self._put(batch_id, kept)
            reply.batch.CopyFrom(self._describe(batch_id))
        return reply

    def clear(self, batch_id: int | None) -> None:
        self.release(list(self.held) if batch_id is None else [batch_id])

    def release(self, ids: Sequence[int]) -> None:
        """Forget batches, known or not, and give their rows back."""
        for batch_id in ids:
            self._named_at.pop(batch_id, None)
            self.rows.release(self.held.pop(batch_id, []))

    # --- time ---------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Serve what was taken, then refuse; ends when no router is between two of its calls."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._until(lambda: not self.held)
        self._closed = True
        self.rows.notify()
        await self._until(lambda: not self.held)

    async def expire(self) -> None:
        """Release batches whose lease has ended, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._lease / 4)
            ended = [
                batch_id
                for batch_id, at in self._named_at.items()
                if clock() - at >= self._lease and batch_id not in self._in_use
            ]
            self.release(ended)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.rows.change()

    # --- steps --------------------------------------------------------------------------------

    def _step(self, reply: Any, batch_id: int, sequences: list[Request], joined: bool) -> Any:
        self.rows.admit()
        for each in sequences:
            if not each.has_row:
                continue
            generation = each.advance(each.next_chunk)
            if generation is not None:
                reply.generations.append(generation)
        self.rows.release(each for each in sequences if each.stopped)
        if not all(each.stopped for each in sequences):
            self._put(batch_id, sequences)
            reply.batch.CopyFrom(self._describe(batch_id))
        reply.forward_ns, reply.decode_ns, reply.total_ns = 2, 1, 4
        if joined:
            reply.concat_ns = 1
        return reply

    def _describe(self, batch_id: int) -> Any:
        held = self.held[batch_id]
        most = sum(each.bound for each in held if not each.stopped)
        current = sum(each.next_tokens for each in held)
        if self._draining or not all(each.has_row or each.stopped for each in held):
            most, current = max(most, self.rows.slots), max(current, self.max_prefill_tokens)
        return pb.CachedBatch(
            id=batch_id,
            request_ids=[each.request.id for each in held],
            size=len(held),
            max_tokens=most,
            current_tokens=current,
        )

    def _check_open(self, named: Sequence[int]) -> None:
        if self._closed:
            self.release(named)
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is draining")

    def _check_known(self, ids: Sequence[int]) -> None:
        for batch_id in ids:
            if batch_id not in self.held:
                self.release(ids)
                message = f"Batch ID {batch_id} not found in cache."
                raise Refused(grpc.StatusCode.NOT_FOUND, message)

    def _take(self, ids: Sequence[int]) -> list[Request]:
        self._check_known(ids)
        for batch_id in ids:
            self._named_at.pop(batch_id)
        return [each for batch_id in ids for each in self.held.pop(batch_id)]

    def _put(self, batch_id: int, sequences: list[Request]) -> None:
        self.held[batch_id] = sequences
        self._name([batch_id])

    def _name(self, ids: Sequence[int]) -> None:
        now = asyncio.get_running_loop().time()
        self._named_at.update((each, now) for each in ids if each in self.held)


def _is_liveness(batch: Any) -> bool:
    """A router's probe has a row and a slot of its own."""
    ids = [request.id for request in batch.requests]
    return (
        batch.id == LIVENESS_ID
        and ids == [LIVENESS_ID]
        and batch.requests[0].stopping_parameters.max_new_tokens == 1
    )
