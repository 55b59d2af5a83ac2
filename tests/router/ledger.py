"""What a shard must still know, kept beside the router's own books and compared with every reply.

A router notices few of a shard's mistakes at once; this ledger notices them in the step where they
happen. It knows which requests each batch in the shard holds and which of them have stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.records import Batch, CachedBatch, FinishReason, Generation, StepReply
from router.startup import RouterPanic


@dataclass
class _Held:
    """A batch in the shard: its requests in order, with what is known of each."""

    ids: list[int]
    stopped: set[int] = field(default_factory=set)
    #: Requests whose prompt is complete: each step must bring them a token.
    generating: set[int] = field(default_factory=set)


class Ledger:
    """Every check raises `RouterPanic`, saying which request or batch is wrong and how."""

    def __init__(self) -> None:
        self._batches: dict[int, _Held] = {}

    def prefilled(self, batch: Batch, cached: CachedBatch | None, reply: StepReply) -> None:
        """Check the reply to a Prefill; `cached` keeps its id, and its requests come first."""
        ids = [request.id for request in batch.requests]
        partial = {each.id for each in batch.requests if each.chunk_len is not None}
        held = _Held(ids, generating=set(ids) - partial)
        self._batches[batch.id] = held
        if cached is None:
            self._step([batch.id], reply)
        else:
            self._step([cached.id, batch.id], reply)

    def decoded(self, batches: Sequence[CachedBatch], reply: StepReply) -> None:
        self._step([batch.id for batch in batches], reply)

    def filtered(self, batch_id: int, kept: Iterable[int], reply: CachedBatch | None) -> None:
        """Check FilterBatch: it keeps exactly the ids that it was given."""
        held, wanted = self._batches[batch_id], set(kept)
        if reply is None:
            raise RouterPanic(f"FilterBatch of batch {batch_id} returned no batch")
        held.ids = [each for each in held.ids if each in wanted]
        held.stopped &= wanted
        self._compare(batch_id, held, reply)

    def cleared(self, batch_id: int) -> None:
        self._batches.pop(batch_id, None)

    def _step(self, batch_ids: list[int], reply: StepReply) -> None:
        held = self._join(batch_ids)
        self._generations(held, reply.generations)
        alive = [each for each in held.ids if each not in held.stopped]
        if reply.batch is None:
            if alive:
                raise RouterPanic(f"no batch came back, but requests {alive} have not stopped")
            del self._batches[batch_ids[0]]
            return
        if not alive:
            raise RouterPanic(f"batch {reply.batch.id} came back, but all its requests stopped")
        self._compare(batch_ids[0], held, reply.batch)

    def _join(self, batch_ids: list[int]) -> _Held:
        first = self._batches[batch_ids[0]]
        for other_id in batch_ids[1:]:
            other = self._batches.pop(other_id)
            first.ids += other.ids
            first.stopped |= other.stopped
            first.generating |= other.generating
        return first

    def _generations(self, held: _Held, generations: Sequence[Generation]) -> None:
        seen: set[int] = set()
        for generation in generations:
            request_id = generation.request_id
            if request_id not in held.ids:
                raise RouterPanic(f"request id {request_id} not found in entries")
            if request_id in seen:
                raise RouterPanic(f"request {request_id} has two generations in one step")
            if request_id in held.stopped:
                raise RouterPanic(f"request {request_id} has a generation after it stopped")
            check_generation(generation)
            seen.add(request_id)
            held.generating.add(request_id)
            if generation.generated_text is not None:
                held.stopped.add(request_id)
        missing = held.generating.intersection(held.ids) - seen - held.stopped
        if missing:
            raise RouterPanic(f"requests {sorted(missing)} have no generation in this step")

    def _compare(self, batch_id: int, held: _Held, reply: CachedBatch) -> None:
        if reply.id != batch_id:
            raise RouterPanic(f"batch {batch_id} came back as {reply.id}")
        if reply.size != len(reply.request_ids):
            raise RouterPanic(
                f"batch {batch_id} has size {reply.size} and {len(reply.request_ids)} request ids"
            )
        if sorted(reply.request_ids) != sorted(held.ids):
            raise RouterPanic(
                f"batch {batch_id} came back with requests {list(reply.request_ids)}; "
                f"it holds {held.ids}"
            )


def check_generation(generation: Generation) -> None:
    """Everything about one generation that panics a router or silently loses tokens."""
    name = f"the generation of request {generation.request_id}"
    tokens = generation.tokens
    if tokens is None:
        raise RouterPanic(f"{name} has no tokens")
    if not tokens.ids:
        raise RouterPanic(f"{name} has zero token ids")
    lengths = [len(tokens.ids), len(tokens.logprobs), len(tokens.texts), len(tokens.is_special)]
    if len(set(lengths)) != 1:
        raise RouterPanic(f"{name} has ids, logprobs, texts and flags of unequal lengths {lengths}")
    prefill = generation.prefill_tokens
    if prefill is not None and not len(prefill.ids) == len(prefill.logprobs) == len(prefill.texts):
        raise RouterPanic(f"{name} has prefill ids, logprobs and texts of unequal lengths")
    if generation.top_tokens and len(generation.top_tokens) != len(tokens.ids):
        raise RouterPanic(
            f"{name} has {len(tokens.ids)} tokens and {len(generation.top_tokens)} top_tokens"
        )
    text = generation.generated_text
    if text is not None and text.finish_reason not in set(FinishReason):
        raise RouterPanic(f"{name} has finish reason {text.finish_reason}")
