"""What a shard must still know, kept beside the router's own books and compared with every reply.

A router notices few of a shard's mistakes at once; this ledger notices them in the step where they
happen. It knows which requests each batch in the shard holds, which of them wait for their first
token and which have stopped. Requests that a reply no longer names are the batching loop's
business: it loses them as a router does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.faults import BrokenPromise, RouterPanic
from router.records import Batch, CachedBatch, FinishReason, Generation, StepReply


@dataclass
class _Held:
    """A batch in the shard: its requests in order, with what is known of each."""

    ids: list[int]
    #: Whose prompt was sent in part, so that no token may follow it.
    partial: set[int] = field(default_factory=set)
    #: Requests with a token: from then on each step must bring them one.
    started: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)

    @property
    def waiting(self) -> list[int]:
        """Requests whose whole prompt the shard has, and which it has not begun."""
        begun = self.started | self.stopped | self.partial
        return [each for each in self.ids if each not in begun]


class Ledger:
    """Raises `RouterPanic` or `BrokenPromise`, saying which request or batch is wrong and how.

    Args:
        prefill_tokens: a batch in which requests wait says no fewer current tokens, so that no
            prompt joins it. 0 where the wire has no such field.
        total_tokens: nor fewer max_tokens than this.
    """

    def __init__(self, prefill_tokens: int, total_tokens: int) -> None:
        self._prefill_tokens = prefill_tokens
        self._total_tokens = total_tokens
        self._batches: dict[int, _Held] = {}

    def prefilled(self, batch: Batch, cached: CachedBatch | None, reply: StepReply) -> None:
        """Check the reply to a Prefill; `cached` keeps its id, and its requests come first."""
        partial = {each.id for each in batch.requests if each.chunk_len is not None}
        self._batches[batch.id] = _Held([request.id for request in batch.requests], partial)
        self._step([batch.id] if cached is None else [cached.id, batch.id], reply)

    def decoded(self, batches: Sequence[CachedBatch], reply: StepReply) -> None:
        self._step([batch.id for batch in batches], reply)

    def filtered(self, batch_id: int, kept: Iterable[int], reply: CachedBatch | None) -> None:
        """Check FilterBatch: it keeps no others than the ids that it was given."""
        if reply is None:
            self.cleared(batch_id)
            return
        held, wanted = self._batches[batch_id], set(kept)
        held.ids = [each for each in held.ids if each in wanted]
        self._compare(batch_id, held, reply)

    def cleared(self, batch_id: int) -> None:
        self._batches.pop(batch_id, None)

    def _step(self, batch_ids: list[int], reply: StepReply) -> None:
        held = self._join(batch_ids)
        self._generations(held, reply.generations)
        if reply.batch is None:
            del self._batches[batch_ids[0]]
            return
        if held.stopped.issuperset(held.ids):
            raise BrokenPromise(f"batch {reply.batch.id} came back, but all its requests stopped")
        self._compare(batch_ids[0], held, reply.batch)

    def _join(self, batch_ids: list[int]) -> _Held:
        first = self._batches[batch_ids[0]]
        for other_id in batch_ids[1:]:
            other = self._batches.pop(other_id)
            first.ids += other.ids
            first.partial |= other.partial
            first.started |= other.started
            first.stopped |= other.stopped
        return first

    def _generations(self, held: _Held, generations: Sequence[Generation]) -> None:
        seen: set[int] = set()
        known = set(held.ids)
        for generation in generations:
            request_id = generation.request_id
            if request_id not in known:
                raise RouterPanic(f"request id {request_id} not found in entries")
            if request_id in seen:
                raise BrokenPromise(f"request {request_id} has two generations in one step")
            if request_id in held.stopped:
                raise RouterPanic(f"request {request_id} has a generation after it stopped")
            check_generation(generation)
            seen.add(request_id)
            if generation.generated_text is not None:
                held.stopped.add(request_id)
        missing = held.started & known - seen - held.stopped
        held.started |= seen
        if missing:
            raise BrokenPromise(f"requests {sorted(missing)} have no generation in this step")

    def _compare(self, batch_id: int, held: _Held, reply: CachedBatch) -> None:
        if reply.id != batch_id:
            raise BrokenPromise(f"batch {batch_id} came back as {reply.id}")
        if reply.size != len(reply.request_ids):
            raise BrokenPromise(
                f"batch {batch_id} has size {reply.size} and {len(reply.request_ids)} request ids"
            )
        surplus = Counter(reply.request_ids) - Counter(held.ids)
        if surplus:
            raise BrokenPromise(
                f"batch {batch_id} came back with requests {sorted(surplus)}, "
                f"which it does not hold: {held.ids}"
            )
        named = set(reply.request_ids)
        held.ids = [each for each in held.ids if each in named]
        self._keeps_joins_away(held, reply)

    def _keeps_joins_away(self, held: _Held, reply: CachedBatch) -> None:
        current, most = reply.current_tokens, reply.max_tokens
        if current >= self._prefill_tokens and most >= self._total_tokens:
            return
        if held.waiting:
            raise BrokenPromise(
                f"requests {held.waiting} wait in batch {reply.id}, which says current_tokens "
                f"{current} of {self._prefill_tokens} and max_tokens {most} of "
                f"{self._total_tokens}: the router sends more"
            )


def check_generation(generation: Generation) -> None:
    """Everything about one generation that panics a router or silently loses tokens."""
    name = f"the generation of request {generation.request_id}"
    tokens = generation.tokens
    if tokens is None:
        raise RouterPanic(f"{name} has no tokens")
    if not tokens.ids:
        # With overflow checks a panic; without them the end of the text is lost.
        raise RouterPanic(f"{name} has zero token ids")
    lengths = [len(tokens.ids), len(tokens.logprobs), len(tokens.texts), len(tokens.is_special)]
    if len(set(lengths)) != 1:
        raise BrokenPromise(f"{name} has ids, logprobs, texts and flags of lengths {lengths}")
    prefill = generation.prefill_tokens
    if prefill is not None and not len(prefill.ids) == len(prefill.logprobs) == len(prefill.texts):
        raise BrokenPromise(f"{name} has prefill ids, logprobs and texts of unequal lengths")
    if generation.top_tokens and len(generation.top_tokens) != len(tokens.ids):
        raise BrokenPromise(
            f"{name} has {len(tokens.ids)} tokens and {len(generation.top_tokens)} top_tokens"
        )
    text = generation.generated_text
    if text is None:
        return
    if text.finish_reason not in set(FinishReason):
        raise RouterPanic(f"{name} has finish reason {text.finish_reason}")
    if text.generated_tokens == 0:
        # Each HTTP handler divides the time by it.
        raise RouterPanic(f"{name} ends with 0 generated_tokens")
