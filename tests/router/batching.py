"""The router's batching task: it takes batches from the queue and drives the shards with them.

    first batch --Prefill--> CachedBatch --+--> join what is due --Decode--> CachedBatch --+
                                           ^      (with chunking, the join is the Prefill)  |
                                           +------------------------------------------------+

A request's entry stays with the run of batches until a generation ends it, until its next
generation finds that nobody listens, or until an error of the step takes all entries of the run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.client import ShardError, Shards
from router.faults import BrokenPromise, RequestLost, RouterPanic
from router.ledger import Ledger
from router.queue import Entry, Queue
from router.records import (
    Batch,
    CachedBatch,
    GeneratedText,
    Generation,
    ShardInfo,
    StepReply,
    TokenRun,
)
from router.startup import Limits, RouterSettings
from router.streams import GenerationError, Token

Entries = dict[int, Entry]


@dataclass(frozen=True)
class Call:
    """One rpc of the batching loop: which, on which batches, with how many requests sent."""

    method: str
    batch_ids: tuple[int, ...]
    size: int = 0


class Infer(Protocol):
    """What the router's other side does with the outcomes of steps."""

    def ended(self, entry: Entry, last: GeneratedText) -> None:
        """A request's last generation of this turn was passed on."""
        ...

    def stepped(self) -> None:
        """A Prefill or Decode was answered."""
        ...

    def failed(self, *, heard: bool) -> None:
        """A Prefill or Decode failed; `heard`: at least one client read of it."""
        ...


class Batching:
    """The loop and what it knows. Run it with `run`, wake it after each append to the queue."""

    def __init__(
        self,
        shards: Shards,
        settings: RouterSettings,
        info: ShardInfo,
        limits: Limits,
        queue: Queue,
        ledger: Ledger,
        infer: Infer,
    ) -> None:
        #: Every call of the loop, in order.
        self.calls: list[Call] = []
        #: Requests that the shards forgot, and how.
        self.lost: list[RequestLost] = []
        self.idle = asyncio.Event()
        self.idle.set()
        self._shards = shards
        self._settings = settings
        self._info = info
        self._limits = limits
        self._queue = queue
        self._ledger = ledger
        self._infer = infer
        self._wake = asyncio.Event()

    def wake(self) -> None:
        self.idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Serve for ever.

        Raises:
            RouterPanic: the loop died.
            BrokenPromise: a reply makes no sense.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            while await self._serve():
                pass
            if not self._wake.is_set():
                self.idle.set()

    async def _serve(self) -> bool:
        """Serve from one first batch until the shard holds nothing; False when none was due."""
        first = self._queue.next_batch(
            min_size=None,
            max_size=self._settings.max_batch_size,
            prefill_budget=self._settings.max_batch_prefill_tokens,
            token_budget=self._limits.max_batch_total_tokens,
        )
        if first is None:
            return False
        entries, batch = first
        cached = await self._prefill(batch, None, entries)
        waiting_tokens = 1
        while cached is not None:
            batches = [cached]
            newcomers = self._newcomers(cached, waiting_tokens)
            if newcomers is not None:
                await self._admit(batches, entries, *newcomers)
                waiting_tokens = 1
                if not batches:
                    break
            cached = await self._decode(batches, entries)
            waiting_tokens += 1
        self._forget(entries)
        return True

    def _newcomers(self, cached: CachedBatch, waiting_tokens: int) -> tuple[Entries, Batch] | None:
        settings = self._settings
        prefill_budget = settings.max_batch_prefill_tokens
        min_size: int | None = None
        max_size: int | None = None
        if self._info.support_chunking:
            prefill_budget = max(0, prefill_budget - cached.current_tokens)
        else:
            if waiting_tokens < settings.max_waiting_tokens:
                min_size = math.floor(cached.size * settings.waiting_served_ratio)
            if settings.max_batch_size is not None:
                max_size = max(0, settings.max_batch_size - cached.size)
        return self._queue.next_batch(
            min_size=min_size,
            max_size=max_size,
            prefill_budget=prefill_budget,
            token_budget=max(0, self._limits.max_batch_total_tokens - cached.max_tokens),
        )

    async def _admit(
        self, batches: list[CachedBatch], entries: Entries, new: Entries, batch: Batch
    ) -> None:
        """Prefill newcomers beside or, with chunking, together with the running batch.

        `batches` becomes what the next Decode names; empty when the run is over.
        """
        if self._info.support_chunking:
            # A failure of this call fails the running requests too.
            entries.update(new)
            result = await self._prefill(batch, batches.pop(), entries)
        else:
            result = await self._prefill(batch, None, new)
            if result is None:
                self._forget(new)
            entries.update(new)
        if result is not None:
            batches.append(result)

    # --- calls --------------------------------------------------------------------------------

    async def _prefill(
        self, batch: Batch, cached: CachedBatch | None, entries: Entries
    ) -> CachedBatch | None:
        ids = (batch.id,) if cached is None else (cached.id, batch.id)
        self.calls.append(Call("Prefill", ids, len(batch.requests)))
        try:
            reply = await self._shards.prefill(batch, cached)
        except ShardError as error:
            # A cached batch is not cleared, though its requests fail too.
            await self._fail(error, [batch.id], entries)
            return None
        self._ledger.prefilled(batch, cached, reply)
        return await self._settle(reply, entries)

    async def _decode(self, batches: list[CachedBatch], entries: Entries) -> CachedBatch | None:
        ids = [batch.id for batch in batches]
        self.calls.append(Call("Decode", tuple(ids), sum(batch.size for batch in batches)))
        try:
            reply = await self._shards.decode(batches)
        except ShardError as error:
            await self._fail(error, ids, entries)
            return None
        self._ledger.decoded(batches, reply)
        return await self._settle(reply, entries)

    async def _settle(self, reply: StepReply, entries: Entries) -> CachedBatch | None:
        self._infer.stepped()
        for generation in reply.generations:
            entry = entries.get(generation.request_id)
            if entry is None:
                # A receiver that hung up is filtered out before its next generation.
                raise RouterPanic(f"request id {generation.request_id} not found in entries")
            if self._send(generation, entry):
                self._queue.release(entries.pop(generation.request_id))
        return None if reply.batch is None else await self._filter(reply.batch, entries)

    async def _filter(self, batch: CachedBatch, entries: Entries) -> CachedBatch | None:
        """Tell the shard what the router no longer wants. Errors here kill a router."""
        named = set(batch.request_ids)
        for request_id, entry in entries.items():
            if request_id not in named:
                self._lose(entry, f"batch {batch.id} came back without it, so its client hangs")
        if batch.size == len(entries):
            return batch
        keep = [each for each in batch.request_ids if each in entries]
        try:
            if not keep:
                self.calls.append(Call("ClearCache", (batch.id,)))
                await self._shards.clear_cache(batch.id)
                self._ledger.cleared(batch.id)
                return None
            self.calls.append(Call("FilterBatch", (batch.id,), len(keep)))
            filtered = await self._shards.filter_batch(batch.id, keep)
        except ShardError as error:
            raise RouterPanic(
                f"{self.calls[-1].method} failed, where routers expect no error: {error}"
            ) from error
        self._ledger.filtered(batch.id, keep, filtered)
        return filtered

    async def _fail(self, error: ShardError, batch_ids: list[int], entries: Entries) -> None:
        for batch_id in batch_ids:
            self.calls.append(Call("ClearCache", (batch_id,)))
            try:
                await self._shards.clear_cache(batch_id)
            except ShardError:
                # Routers ignore this answer, unlike that of `_filter`.
                continue
            finally:
                self._ledger.cleared(batch_id)
        heard = False
        for entry in entries.values():
            self._queue.release(entry)
            if not entry.stream.over:
                entry.stream.fail(GenerationError(error.message))
                heard = True
        entries.clear()
        self._infer.failed(heard=heard)

    # --- requests -----------------------------------------------------------------------------

    def _send(self, generation: Generation, entry: Entry) -> bool:
        """Pass a generation on; True when the entry is over: finished, or nobody listens."""
        stream, tokens, text = entry.stream, generation.tokens, generation.generated_text
        if stream.closed:
            return True
        assert tokens is not None, "the ledger has checked"
        if generation.prefill_tokens is not None:
            if entry.ids or not entry.prompt.prefill_logprobs:
                raise BrokenPromise(f"request {generation.request_id}: unexpected prefill tokens")
            stream.put_prefill(generation.prefill_tokens)
        tops: Sequence[TokenRun | None] = generation.top_tokens or [None] * len(tokens.ids)
        rows = zip(tokens.ids, tokens.texts, tokens.logprobs, tokens.is_special, tops, strict=True)
        for row in rows:
            stream.put_token(Token(*row))
        entry.ids += tokens.ids
        if text is None:
            return False
        self._infer.ended(entry, text)
        return True

    def _lose(self, entry: Entry, why: str) -> None:
        """Say that a request is lost. Its entry stays, as in a router, which does not notice."""
        if entry.lost:
            return
        entry.lost = True
        loss = RequestLost(entry.request_id, why)
        self.lost.append(loss)
        if not entry.stream.over:
            entry.stream.fail(loss)

    def _forget(self, entries: Entries) -> None:
        """The run is over: a router drops what it still has, without a word to the log."""
        for entry in entries.values():
            self._lose(entry, "no batch came back, so its client reads `Incomplete generation`")
            self._queue.release(entry)
        entries.clear()
