"""A stock TGI router without its HTTP side: start-up, queue, batching loop, health."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, replace

from router.client import ShardError, Shards
from router.ledger import Ledger
from router.queue import Entry, Queue
from router.records import (
    LIVENESS_ID,
    Batch,
    CachedBatch,
    FinishReason,
    Generation,
    Request,
    ShardInfo,
    StepReply,
)
from router.startup import Limits, RouterPanic, RouterSettings, agree_on_limits, connect
from router.streams import (
    GenerationError,
    Prompt,
    Result,
    Stream,
    Token,
)
from router.wire import V3, Wire

Entries = dict[int, Entry]


class Overloaded(Exception):
    """More requests at once than max_concurrent_requests (HTTP 429)."""


class ValidationError(Exception):
    """The router refuses the prompt before any shard sees it (HTTP 422)."""


@dataclass(frozen=True)
class Call:
    """One rpc of the batching loop: which, on which batches, with how many requests sent."""

    method: str
    batch_ids: tuple[int, ...]
    size: int = 0


class Router:
    """Drives the shards behind one socket. Make it with `start`, end it with `stop`.

    Whatever would panic the real batching task ends this one with `RouterPanic`, which every open
    stream and `stop` then raise.
    """

    def __init__(
        self,
        shards: Shards,
        wire: Wire,
        settings: RouterSettings,
        info: ShardInfo,
        limits: Limits,
        seed: int,
    ) -> None:
        self.info = info
        self.limits = limits
        self.queue = Queue(wire, info, limits)
        #: Every call of the batching loop, in order.
        self.calls: list[Call] = []
        #: Whether the last generation succeeded; a v2 router believes in none before the first.
        self.healthy = wire.name == "v3"
        self._shards = shards
        self._wire = wire
        self._settings = settings
        self._random = random.Random(seed)
        self._ledger = Ledger()
        self._open: set[Stream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._batching())

    @classmethod
    async def start(
        cls,
        path: str,
        *,
        wire: Wire | None = None,
        settings: RouterSettings | None = None,
        seed: int = 0,
    ) -> Router:
        """Go through the start-up with the shard at the unix socket `path`.

        Raises:
            StartupError: the router would exit with a message.
            RouterPanic: the router would exit with a panic.
            ShardError: Info, ClearCache or Warmup failed.
        """
        wire, settings = wire or V3(), settings or RouterSettings()
        shards = await connect(path, wire)
        try:
            info, limits = await agree_on_limits(shards, wire, settings)
        except BaseException:
            await shards.close()
            raise
        return cls(shards, wire, settings, info, limits, seed)

    async def stop(self) -> None:
        """End at once, as a killed router does: what runs in the shards stays there.

        Raises:
            RouterPanic: the batching loop had died before.
        """
        self._task.cancel()
        (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
        await self._shards.close()
        if isinstance(outcome, Exception):
            raise outcome

    def submit(self, prompt: Prompt) -> Stream:
        """Queue a prompt.

        Raises:
            Overloaded: max_concurrent_requests are open.
            ValidationError: the prompt breaks the router's limits.
        """
        self._open = {stream for stream in self._open if not stream.over}
        if len(self._open) >= self._settings.max_concurrent_requests:
            raise Overloaded(f"{len(self._open)} requests are open")
        entry = self._entry(prompt)
        self._open.add(entry.stream)
        self.queue.append(entry)
        self._idle.clear()
        self._wake.set()
        return entry.stream

    async def idle(self) -> None:
        """Wait until no request waits and no batch runs, be it only to be dropped."""
        await self._idle.wait()

    async def generate(self, prompt: Prompt) -> Result:
        """Submit a prompt and read its stream to the end."""
        return await self.submit(prompt).result()

    async def health(self) -> bool:
        """`/health`: the Health rpc while generations succeed, else a Prefill of one token."""
        try:
            if self.healthy:
                await self._shards.health()
            else:
                reply = await self._shards.prefill(self._liveness())
                if reply.batch is not None:
                    raise RouterPanic(f"the liveness batch stays cached: {reply.batch}")
        except ShardError:
            return False
        return True

    # --- validation ---------------------------------------------------------------------------

    def _entry(self, prompt: Prompt) -> Entry:
        limit = self.limits.max_input_tokens
        truncate = min(prompt.truncate or limit, limit)
        length = min(prompt.input_length, prompt.truncate or prompt.input_length)
        if length > limit:
            raise ValidationError(f"inputs has {length} tokens; the limit is {limit}")
        if length + prompt.max_new_tokens > self.limits.max_total_tokens:
            raise ValidationError(
                f"inputs ({length}) + max_new_tokens ({prompt.max_new_tokens}) is over "
                f"max_total_tokens, {self.limits.max_total_tokens}"
            )
        if prompt.sampling.do_sample and prompt.sampling.seed == 0:
            seed = self._random.getrandbits(64)
            prompt = replace(prompt, sampling=replace(prompt.sampling, seed=seed))
        return Entry(prompt, length, truncate, Stream())

    def _liveness(self) -> Batch:
        request = Request(
            id=LIVENESS_ID,
            inputs="liveness",
            truncate=1 if self._wire.name == "v3" else 10,
            max_new_tokens=1,
            add_special_tokens=False,
            blocks=(0,),
            slots=(0,),
        )
        return Batch(LIVENESS_ID, (request,), max_tokens=2, max_blocks=1)

    # --- the batching loop --------------------------------------------------------------------

    async def _batching(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while await self._serve():
                    pass
                if not self._wake.is_set():
                    self._idle.set()
        except Exception as error:
            panic = error if isinstance(error, RouterPanic) else RouterPanic(str(error))
            for stream in self._open:
                if not stream.over:
                    stream.fail(panic)
            raise panic from error

    async def _serve(self) -> bool:
        """Serve from one first batch until the shard holds nothing; False when none was due."""
        first = self.queue.next_batch(
            min_size=None,
            max_size=self._settings.max_batch_size,
            prefill_budget=self._settings.max_batch_prefill_tokens,
            token_budget=self.limits.max_batch_total_tokens,
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
                joined = await self._admit(batches, entries, *newcomers)
                waiting_tokens = 1
                if not joined:
                    break
            cached = await self._decode(batches, entries)
            waiting_tokens += 1
        if entries:
            raise RouterPanic(f"requests {list(entries)} were forgotten before they finished")
        return True

    def _newcomers(self, cached: CachedBatch, waiting_tokens: int) -> tuple[Entries, Batch] | None:
        settings = self._settings
        prefill_budget = settings.max_batch_prefill_tokens
        min_size: int | None = None
        max_size: int | None = None
        if self.info.support_chunking:
            prefill_budget = max(0, prefill_budget - cached.current_tokens)
        else:
            if waiting_tokens < settings.max_waiting_tokens:
                min_size = math.floor(cached.size * settings.waiting_served_ratio)
            if settings.max_batch_size is not None:
                max_size = max(0, settings.max_batch_size - cached.size)
        return self.queue.next_batch(
            min_size=min_size,
            max_size=max_size,
            prefill_budget=prefill_budget,
            token_budget=max(0, self.limits.max_batch_total_tokens - cached.max_tokens),
        )

    async def _admit(
        self, batches: list[CachedBatch], entries: Entries, new: Entries, batch: Batch
    ) -> bool:
        """Prefill newcomers beside or, with chunking, together with the running batch.

        `batches` becomes what the next Decode names; False when nothing is left to decode.
        """
        if self.info.support_chunking:
            # A failure of this call fails the running requests too.
            entries.update(new)
            result = await self._prefill(batch, batches.pop(), entries)
            if result is not None:
                batches.append(result)
            return bool(batches)
        result = await self._prefill(batch, None, new)
        entries.update(new)
        if result is not None:
            batches.append(result)
        return True

    async def _prefill(
        self, batch: Batch, cached: CachedBatch | None, entries: Entries
    ) -> CachedBatch | None:
        ids = (batch.id,) if cached is None else (cached.id, batch.id)
        self.calls.append(Call("Prefill", ids, len(batch.requests)))
        try:
            reply = await self._shards.prefill(batch, cached)
        except ShardError as error:
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
        self.healthy = True
        for generation in reply.generations:
            entry = entries.get(generation.request_id)
            if entry is None:
                # A receiver that hung up is filtered out before its next generation.
                raise RouterPanic(f"request id {generation.request_id} not found in entries")
            if self._send(generation, entry):
                self.queue.release(entries.pop(generation.request_id))
        return None if reply.batch is None else await self._filter(reply.batch, entries)

    async def _filter(self, batch: CachedBatch, entries: Entries) -> CachedBatch | None:
        """Tell the shard what the router no longer wants. Errors here kill a router."""
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
            raise RouterPanic(f"an error where routers expect none: {error}") from error
        self._ledger.filtered(batch.id, keep, filtered)
        return filtered

    async def _fail(self, error: ShardError, batch_ids: list[int], entries: Entries) -> None:
        self.healthy = False
        for batch_id in batch_ids:
            self.calls.append(Call("ClearCache", (batch_id,)))
            try:
                await self._shards.clear_cache(batch_id)
            except ShardError:
                # Routers ignore this answer, unlike that of `_filter`.
                continue
            self._ledger.cleared(batch_id)
        for entry in entries.values():
            self.queue.release(entry)
            if not entry.stream.closed:
                entry.stream.fail(GenerationError(error.message))
        entries.clear()

    def _send(self, generation: Generation, entry: Entry) -> bool:
        """Pass a generation on; True when the entry is over: finished, or nobody listens."""
        stream, tokens, text = entry.stream, generation.tokens, generation.generated_text
        if stream.closed:
            return True
        assert tokens is not None, "the ledger has checked"
        if generation.prefill_tokens is not None:
            if stream.started or not entry.prompt.prefill_logprobs:
                raise RouterPanic(f"request {generation.request_id}: unexpected prefill tokens")
            stream.put_prefill(generation.prefill_tokens)
        tops = list(generation.top_tokens) or [None] * len(tokens.ids)
        rows = zip(tokens.ids, tokens.texts, tokens.logprobs, tokens.is_special, tops, strict=True)
        for row in rows:
            stream.put_token(Token(*row))
        if text is None:
            return False
        stream.finish(text, FinishReason(text.finish_reason))
        return True
