"""TGI's shard protocol: what a router asks, answered by the engine's `Advance` and `Abort`.

A router numbers batches; the engine knows sequences only. The batches live here: which sequences a
batch holds, what text each has so far, which have stopped. A batch that an rpc is working on is out
of the table (batches.py), so a second rpc with its id does not find it, as in TGI's own shards.

    Prefill   new sequences (+ one step of a cached batch) -> batch in the table, unless all stopped
    Decode    batches out of the table -> one step -> one batch, under the first one's id
    Filter    drops sequences from a batch; ClearCache drops batches
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Protocol, TypeVar

from tokenpod.engine.types import (
    Failure,
    FinishCode,
    Request,
    Started,
    StoppingParams,
    Top,
)
from tokenpod.service import validate
from tokenpod.service.admission import Admission
from tokenpod.service.batches import Batches
from tokenpod.service.calls import (
    CachedBatch,
    PrefillCall,
    ShardBatch,
    ShardGeneration,
    ShardRequest,
    ShardStep,
    WarmupCall,
)
from tokenpod.service.errors import InvalidArgument, NotFound, ServiceError, engine_failure
from tokenpod.service.generate import Encoder, Serving
from tokenpod.service.routed import HeldSequence

T = TypeVar("T")


class Shard(Protocol):
    """The shard rpcs of a pod, whether it leads or follows."""

    @property
    def urls(self) -> Sequence[str]:
        """Where the leader is: it speaks for every rank."""
        ...

    @property
    def batches(self) -> Batches:
        """What routers hold in this pod."""
        ...

    async def prefill(self, call: PrefillCall) -> ShardStep:
        """New prompts."""
        ...

    async def decode(self, batch_ids: Sequence[int]) -> ShardStep:
        """One more token for each."""
        ...

    async def filter(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """Drop what is not named."""
        ...

    async def clear(self, batch_id: int | None) -> None:
        """Forget one batch, or all."""
        ...

    def warmup(self, call: WarmupCall) -> tuple[int, int, int]:
        """(tokens that fit in all, max_input_tokens, max_total_tokens)."""
        ...


class StepSink:
    """Gathers one step's tokens for the sequences of a batch."""

    def __init__(self, sequences: Iterable[HeldSequence]) -> None:
        self.generations: list[ShardGeneration] = []
        self.failure: ServiceError | None = None
        self._by_id = {sequence.sequence_id: sequence for sequence in sequences}
        self._started: dict[int, Started] = {}

    def on_started(self, started: Started) -> None:
        """A prompt is complete."""
        self._started[started.sequence_id] = started

    def on_token(
        self, sequence_id: int, token_id: int, logprob: float, finish: FinishCode, top: Top | None
    ) -> None:
        """The one token of a sequence in this step."""
        sequence = self._by_id[sequence_id]
        started = self._started.get(sequence_id)
        self.generations.append(sequence.push(token_id, logprob, finish, top, started))

    def on_failure(self, failure: Failure) -> None:
        """The protocol has no failure of one request: the rpc fails."""
        self.failure = engine_failure(failure)

    def wake(self) -> None:
        """Nothing waits between messages: the rpc waits for the whole step."""


class ShardService:
    """The shard rpcs, the same for every wire generation. Make it when the model is ready.

    Args:
        serving: engine, tokenizer and limits.
        admission: says no while the pod drains.
        urls: the addresses of all shards, this one included.
        prefill_tokens: prompt tokens that one step takes.
    """

    def __init__(
        self, serving: Serving, admission: Admission, *, urls: Sequence[str], prefill_tokens: int
    ) -> None:
        self.urls = urls
        self.batches = Batches()
        self._serving = serving
        self._admission = admission
        self._encoder = Encoder(serving.tokenizer)
        self._prefill_tokens = prefill_tokens
        self._working: set[asyncio.Task[object]] = set()

    # -- rpcs ----------------------------------------------------------------------------------

    async def prefill(self, call: PrefillCall) -> ShardStep:
        """Process new prompts, and one step of a cached batch that they join.

        If it fails, the cached batch is gone too: routers give up its requests and never name it
        again. So while the pod drains, Unavailable is for those that join no batch.
        """
        if call.cached_batch_id is None or call.cached_batch_id not in self.batches:
            self._admission.check_open()
        with self.batches.call():
            return await self._prefill(call)

    async def decode(self, batch_ids: Sequence[int]) -> ShardStep:
        """One step for one or several batches, which become one."""
        if not batch_ids:
            raise InvalidArgument("batches", "is empty: Must provide at least one batch")
        began = time.monotonic_ns()
        for batch_id in batch_ids:
            self.batches.expect(batch_id)
        if len(set(batch_ids)) < len(batch_ids):
            raise InvalidArgument("batches", "names the same batch twice")
        sequences = [sequence for batch_id in batch_ids for sequence in self.batches.take(batch_id)]
        concat_ns = time.monotonic_ns() - began if len(batch_ids) > 1 else None
        with self.batches.call():
            return await self._finish(self._step(batch_ids[0], sequences, concat_ns=concat_ns))

    async def filter(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """Keep only these requests of a batch; with none of them left the batch is gone."""
        keep = set(request_ids)
        batch = self.batches.take(batch_id)
        with self.batches.call():
            self._drop(sequence for sequence in batch if sequence.request_id not in keep)
            kept = [sequence for sequence in batch if sequence.request_id in keep]
            left = self._put(batch_id, kept, stopped_too=True)
        return left or CachedBatch(batch_id, request_ids=(), max_tokens=0, current_tokens=0)

    async def clear(self, batch_id: int | None) -> None:
        """Forget a batch, or all of them, those that an rpc is working on included."""
        if batch_id is not None:
            self._drop(self.batches.discard(batch_id))
            return
        self._drop(self.batches.discard_all())
        for task in self._working:
            task.cancel()

    def warmup(self, call: WarmupCall) -> tuple[int, int, int]:
        """(tokens that fit in all, max_input_tokens, max_total_tokens); see `agreed_limits`."""
        return agreed_limits(call, self._serving.limits)

    # -- batches -------------------------------------------------------------------------------

    def _put(
        self, batch_id: int, batch: list[HeldSequence], *, stopped_too: bool = False
    ) -> CachedBatch | None:
        """Keep a batch unless all of it has stopped; what the router is told of it."""
        live = [sequence for sequence in batch if not sequence.stopped]
        if not live and not (stopped_too and batch):
            return None
        self._drop(self.batches.discard(batch_id))
        self.batches.put(batch_id, batch)
        return CachedBatch(
            id=batch_id,
            request_ids=[sequence.request_id for sequence in batch],
            max_tokens=sum(sequence.bound for sequence in live),
            current_tokens=sum(sequence.next_tokens for sequence in live),
        )

    def _drop(self, sequences: Iterable[HeldSequence]) -> None:
        ids = [sequence.sequence_id for sequence in sequences if not sequence.stopped]
        self._serving.client.abort(ids)

    async def _open(self, batch: ShardBatch) -> tuple[list[Request], list[HeldSequence]]:
        """Tokenise a batch's prompts; nothing exists in the engine yet."""
        requests: list[Request] = []
        sequences: list[HeldSequence] = []
        texts = [(asked.inputs, asked.add_special_tokens) for asked in batch.requests]
        prompts = await self._encoder.encode_all(texts)
        for at, (asked, prompt) in enumerate(zip(batch.requests, prompts, strict=True)):
            if asked.truncate:
                prompt = prompt[-asked.truncate :]
            validate.check_shard_length(asked, at, len(prompt), self._serving.limits)
            request = self._request(asked, prompt)
            requests.append(request)
            sequences.append(HeldSequence(asked, request, self._serving.tokenizer))
        return requests, sequences

    def _request(self, asked: ShardRequest, prompt: list[int]) -> Request:
        eos = self._serving.tokenizer.eos_token_ids
        return Request(
            sequence_ids=self._serving.client.new_sequence_ids(1),
            prompt=prompt,
            sampling=validate.shard_sampling_params(asked),
            stopping=StoppingParams(
                max_new_tokens=asked.max_new_tokens,
                eos_token_ids=frozenset() if asked.ignore_eos else eos,
                length_first=True,
            ),
            logprobs=True,
            top_n_tokens=asked.top_n_tokens,
            prompt_logprobs=asked.prefill_logprobs,
            arrived_at=time.monotonic_ns(),
        )

    # -- steps ---------------------------------------------------------------------------------

    async def _prefill(self, call: PrefillCall) -> ShardStep:
        try:
            validate.check_shard_batch(call.batch, self._serving.limits)
            requests, sequences = await self._open(call.batch)
        except ServiceError:
            if call.cached_batch_id is not None:
                self._drop(self.batches.discard(call.cached_batch_id))
            raise
        cached: list[HeldSequence] = []
        joined_id = call.batch.id
        if call.cached_batch_id is not None:
            cached = self.batches.take(call.cached_batch_id)
            joined_id = call.cached_batch_id
        self._drop(self.batches.discard(call.batch.id))
        return await self._finish(self._step(joined_id, cached, sequences, requests))

    async def _finish(self, step: Coroutine[object, object, ShardStep]) -> ShardStep:
        """Run a step to its end even if the router hangs up: its batch must not get lost."""
        task = asyncio.create_task(step)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                # ClearCache took the batch away under this very call.
                raise NotFound("batch", "", "the batch was cleared while it was in use") from None
            raise

    async def _step(
        self,
        batch_id: int,
        resumed: list[HeldSequence],
        fresh: Sequence[HeldSequence] = (),
        requests: Sequence[Request] = (),
        concat_ns: int | None = None,
    ) -> ShardStep:
        batch = [*resumed, *fresh]
        live = [sequence for sequence in resumed if not sequence.stopped]
        sink = StepSink(batch)
        try:
            advanced = await self._serving.client.advance(
                start=list(requests),
                start_until=[sequence.begin() for sequence in fresh],
                resume=[sequence.sequence_id for sequence in live],
                resume_until=[sequence.resume(self._prefill_tokens) for sequence in live],
                sink=sink,
            )
        except asyncio.CancelledError:
            self._drop(batch)
            raise
        failure = engine_failure(advanced.failure) if advanced.failure else sink.failure
        if failure is not None:
            self._drop(batch)
            raise failure
        # A stop sequence is the text's business: the engine has yet to hear of it.
        self._serving.client.abort(s.sequence_id for s in batch if s.stopped_by_text)
        if fresh and resumed and concat_ns is None:
            concat_ns = 0
        return ShardStep(
            generations=sink.generations,
            batch=self._put(batch_id, batch),
            forward_ns=advanced.forward_ns,
            decode_ns=advanced.decode_ns,
            total_ns=advanced.total_ns,
            concat_ns=concat_ns,
        )


def agreed_limits(call: WarmupCall, limits: validate.RequestLimits) -> tuple[int, int, int]:
    """(tokens that fit in all, max_input_tokens, max_total_tokens).

    The model is warm already. A router with limits of its own insists on hearing them again.
    """
    if call.max_total_tokens is not None and call.max_total_tokens < 2:
        raise InvalidArgument(
            "max_total_tokens",
            f"is {call.max_total_tokens}; a prompt and its output have at least 2 tokens",
        )
    total = call.max_total_tokens or limits.max_total_tokens
    if total > limits.max_total_tokens:
        raise InvalidArgument(
            "max_total_tokens",
            f"is {total}; this server allows at most {limits.max_total_tokens}"
            " (--max-total-tokens)",
        )
    most_in = call.max_input_tokens or min(limits.max_input_tokens, total - 1)
    if most_in > limits.max_input_tokens:
        raise InvalidArgument(
            call.input_field,
            f"is {most_in}; this server allows at most {limits.max_input_tokens}"
            " (--max-input-tokens)",
        )
    if most_in >= total:
        raise InvalidArgument(
            call.input_field,
            f"is {most_in}; it must be below max_total_tokens, {total}",
        )
    return limits.slots, most_in, total
