"""Texts that are read for numbers: from a call to the engine's answer.

    with service.admit(remaining) as admitted:       a place in the bounded queue
        vectors = await admitted.read(call, ...)     checked, tokenised, read by the engine

Each text is a request of its own to the engine, so that texts of all calls share steps. No module
here knows a message of a protocol.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenpod.core.requests import PoolingParams, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.service.admission.admission import Admission, Place, RequestStream
from tokenpod.service.admission.memory_budget import Lease
from tokenpod.service.calls.call import ID_BYTES, deadline_of
from tokenpod.service.calls.embedding import (
    AskedText,
    ReadCall,
    ReadLimits,
    Truncation,
)
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.pooled import Floats, PooledTexts
from tokenpod.service.serving.generate import GenerateService
from tokenpod.service.serving.numbers import SparseVector, nonzero, of_words, shown
from tokenpod.service.serving.serving import Serving
from tokenpod.service.telemetry.server_calls import ServerCall, current_call
from tokenpod.service.text.encoder import Tokenised
from tokenpod.service.text.tokenizers.special_tokens import SpecialTokens
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer
from tokenpod.service.text.workers.text_messages import Text


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text that has been read."""

    #: [count, width] float32
    vectors: Floats
    #: Tokens that were read, and those that were left out.
    tokens: int
    left_out: int
    #: Where it was asked for.
    sparse: SparseVector | None = None


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """What a call's time went into, in nanoseconds."""

    total_ns: int
    tokenising_ns: int
    #: Until the first step with any of its texts was planned, and from there to the last answer.
    queue_ns: int
    computing_ns: int


@dataclass(frozen=True, slots=True)
class _Framed:
    """What the engine is given of a text."""

    ids: list[int]
    left_out: int
    #: Tokens of it; more than `ids` where it is too long and may not be cut.
    count: int


class ReadingService:
    """Admits calls that want numbers of texts, and tokenises.

    Args:
        admission: the pod's.
        generate: has what is served.
    """

    def __init__(self, admission: Admission, generate: GenerateService) -> None:
        self._admission = admission
        self._generate = generate

    @contextlib.contextmanager
    def admit(
        self, remaining: float | None, stream: RequestStream | None = None
    ) -> Iterator[AdmittedTexts]:
        """Hold a place for one call; what it has read is cancelled at the end.

        Args:
            remaining: seconds until its deadline; None: it has none.
            stream: whose request it is; None: it is the call's only one.

        Raises Unavailable or ResourceExhausted at once if there is no place, or no row in time.
        """
        arrived_at = time.monotonic_ns()
        with self._admission.enter(remaining, stream) as place:
            place.line_up()
            admitted = AdmittedTexts(
                self._generate.serving, self._admission, place, arrived_at, current_call()
            )
            try:
                yield admitted
            finally:
                admitted.end()


class AdmittedTexts:
    """A call that holds a place.

    Args:
        serving: engine, tokenizer and limits.
        admission: memory of the front ends, and how long calls take.
        place: the call's in the queue.
        arrived_at: CLOCK_MONOTONIC nanoseconds.
        recorded: its record in telemetry; None: it has none.
    """

    def __init__(
        self,
        serving: Serving,
        admission: Admission,
        place: Place,
        arrived_at: int,
        recorded: ServerCall | None,
    ) -> None:
        self._serving = serving
        self._admission = admission
        self._place = place
        self._arrived_at = arrived_at
        self._recorded = recorded
        self._lease: Lease | None = None
        self._texts: PooledTexts | None = None
        #: CLOCK_MONOTONIC nanoseconds.
        self._tokenised_at = self._read_at = arrived_at

    @property
    def times(self) -> ReadTimes:
        """Of a call whose texts have been read."""
        began_at = self._texts.began_at if self._texts is not None else None
        began_at = began_at or self._tokenised_at
        return ReadTimes(
            self._read_at - self._arrived_at,
            self._tokenised_at - self._arrived_at,
            max(began_at - self._tokenised_at, 0),
            max(self._read_at - began_at, 0),
        )

    @property
    def limits(self) -> ReadLimits:
        """What a call may ask for."""
        return read_limits(self._serving)

    async def read(
        self, call: ReadCall, texts_field: str, request_id: str, remaining: float | None
    ) -> list[ReadText]:
        """Check, tokenise and read the texts of a call; once.

        Args:
            call: what the client asks for.
            texts_field: where the client put its texts.
            request_id: names the call in logs and traces.
            remaining: seconds until its deadline; None: it has none.

        Raises:
            InvalidArgument: a text is too long or can't be tokenised, or another field is wrong.
            ResourceExhausted: too many tokens wait.
        """
        limits = self.limits
        limits.check(call, texts_field)
        if self._recorded is not None:
            self._recorded.named(request_id, call.labels)
        deadline_at = deadline_of(remaining)
        asked = sum(text.memory for text in call.texts)
        self._lease = self._admission.memory.reserve(asked)
        framed = await self._framed(call, limits)
        counts = [each.count for each in framed]
        limits.check_tokens(call, counts)
        vectors = sum(counts) if call.token_vectors else len(framed)
        width = limits.facts.token_width if call.token_vectors else limits.facts.width
        # Bytes of float32 as they come, and as they are written.
        self._lease.resize(asked + ID_BYTES * sum(counts) + 8 * vectors * width)
        self._place.queue(sum(counts))
        left_out = await self._left_out(call, limits)
        self._tokenised_at = time.monotonic_ns()
        ids = self._serving.client.new_sequence_ids(len(framed))
        requests = [
            Request(
                sequence_ids=[sequence_id],
                prompt=each.ids,
                sampling=SamplingParams(),
                stopping=StoppingParams(max_new_tokens=1),
                priority=call.priority,
                arrived_at=self._arrived_at,
                deadline_at=deadline_at,
                pooling=PoolingParams(
                    call.token_vectors,
                    weights=call.sparse and limits.facts.word_weights,
                    left_out=min(left_out, len(each.ids) - 1),
                ),
            )
            for sequence_id, each in zip(ids, framed, strict=True)
        ]
        self._texts = PooledTexts(requests, self)
        for request in requests:
            self._serving.client.submit(request, self._texts)
        found = await self._texts.all()
        self._read_at = time.monotonic_ns()
        sparse = self._sparse(found, framed, limits) if call.sparse else [None] * len(found)
        limits.check_sparse_bytes(call, sum(len(each.indices) for each in sparse if each))
        return [
            ReadText(numbers, len(each.ids), each.left_out, own)
            for numbers, each, own in zip(found, framed, sparse, strict=True)
        ]

    def _sparse(
        self, vectors: list[Floats], framed: list[_Framed], limits: ReadLimits
    ) -> Sequence[SparseVector | None]:
        """The sparse vector of each text: its vector, or what its tokens weigh as words."""
        if not limits.facts.word_weights:
            return [nonzero(shown(each, ReadCall(()), limits)[0]) for each in vectors]
        assert self._texts is not None
        special = self._serving.tokenizer.special_ids
        return [
            of_words(weights[:, 0], each.ids, special)
            for weights, each in zip(self._texts.weights, framed, strict=True)
        ]

    def end(self) -> None:
        """Cancel what still runs and report the call; its memory is free."""
        if self._texts is not None:
            self._texts.cancel()
        if self._lease is not None:
            self._lease.release()
        if self._texts is not None and self._recorded is not None:
            self._recorded.reads(
                len(self._texts.requests),
                self._texts.tokens,
                arrived_at=self._arrived_at,
                began_at=self._texts.began_at,
            )

    # -- Ender ---------------------------------------------------------------------------------

    def abort(self, sequence_ids: list[int]) -> None:
        """End these in the engine."""
        self._serving.client.abort(sequence_ids)

    def begun(self) -> None:
        """All texts have been read: none waits."""
        self._place.leave_queue()

    # -- tokens --------------------------------------------------------------------------------

    async def _framed(self, call: ReadCall, limits: ReadLimits) -> list[_Framed]:
        """What the engine is to read of each text."""
        special = special_tokens(self._serving)
        prompt, end = self._prompt(call, limits), call.truncation is Truncation.END
        most = limits.max_tokens
        seconds = [text.second for text in call.texts if text.second is not None]
        if seconds:
            # One query for all: it is tokenised once.
            query = call.texts[0].text or ""
            (first,) = await self._tokenised([(call.texts[0], query)], most, end=True)
            own = zip(call.texts, seconds, strict=True)
            documents = await self._tokenised([*own], most, end=end)
            return [
                self._pair(call, text, special, first, document, limits)
                for text, document in zip(call.texts, documents, strict=True)
            ]
        written = [(text, prompt + text.text) for text in call.texts if text.text is not None]
        found = iter(await self._tokenised(written, most, end=end))
        framed = []
        for text in call.texts:
            if text.text is None:
                whole = Tokenised(len(text.tokens), list(text.tokens))
                framed.append(_frame(whole, call.truncation, most, SpecialTokens()))
            else:
                framed.append(_frame(next(found), call.truncation, most, special))
        return framed

    def _pair(
        self,
        call: ReadCall,
        asked: AskedText,
        special: SpecialTokens,
        first: Tokenised,
        second: Tokenised,
        limits: ReadLimits,
    ) -> _Framed:
        room = limits.max_tokens - special.around_two - first.count
        if room < 1:
            raise InvalidArgument(
                "query",
                f"has {first.count} tokens; with {special.around_two} special ones"
                f" {limits.max_tokens} leave no room for a document (--max-input-tokens)",
            )
        kept = _cut(second, call.truncation, room)
        ids = special.two(first.ids, kept, limits.facts.second_text)
        left_out = second.count - len(kept)
        if call.truncation is Truncation.NONE:
            return _Framed(ids, 0, len(ids) + left_out)
        return _Framed(ids, left_out, len(ids))

    async def _tokenised(
        self, texts: Sequence[tuple[AskedText, str]], keep: int, *, end: bool
    ) -> list[Tokenised]:
        """Without special tokens; of long texts the first `keep` tokens, or the last."""
        jobs = [Text(text, False, keep, first=end) for _, text in texts]
        found = await self._serving.encoder.encode_all(jobs, field="text")
        tokenised = []
        for (asked, _), each in zip(texts, found, strict=True):
            if isinstance(each, InvalidArgument):
                each.rename(asked.field)
                raise each
            tokenised.append(each)
        return tokenised

    def _prompt(self, call: ReadCall, limits: ReadLimits) -> str:
        name = limits.facts.default_prompt if call.prompt_name is None else call.prompt_name
        return limits.facts.prompts.get(name, "")

    async def _left_out(self, call: ReadCall, limits: ReadLimits) -> int:
        """Tokens at the beginning of each text that a mean leaves out."""
        prompt = self._prompt(call, limits)
        if limits.facts.pools_prompts or not prompt:
            return 0
        tokenised = await self._serving.encoder.encode(
            prompt, keep=limits.max_tokens, special=False
        )
        return len(special_tokens(self._serving).before) + tokenised.count


def read_limits(serving: Serving) -> ReadLimits:
    """What a call may ask of a model that makes numbers of texts."""
    ready, settings = serving.ready, serving.settings
    assert ready.vectors is not None, "the gate asks what the model is for"
    most = min(ready.max_positions, ready.slots)
    return ReadLimits(
        ready.vectors,
        ready.vocab_size,
        min(settings.max_input_tokens or most, most),
        settings.max_client_batch_size,
        settings.resolved_queue_tokens(ready.slots),
    )


def special_tokens(serving: Serving) -> SpecialTokens:
    """What stands around texts: special tokens, or the words of a model's question."""
    facts = serving.ready.vectors
    if facts is not None and facts.template:
        return _of_question(serving.tokenizer, facts.before, facts.behind)
    return _found(serving.tokenizer)


_found = functools.lru_cache(maxsize=4)(SpecialTokens.of)


@functools.lru_cache(maxsize=4)
def _of_question(tokenizer: Tokenizer, before: str, behind: str) -> SpecialTokens:
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (before, behind)]
    return SpecialTokens(tuple(ids[0]), tuple(ids[1]))


def _frame(
    tokenised: Tokenised, truncation: Truncation, most: int, special: SpecialTokens
) -> _Framed:
    """A text with its special tokens, cut to `most` tokens if it may be."""
    if not tokenised.count:
        return _Framed([], 0, 0)
    kept = _cut(tokenised, truncation, most - special.around_one)
    ids, left_out = special.one(kept), tokenised.count - len(kept)
    if truncation is Truncation.NONE:
        return _Framed(ids, 0, len(ids) + left_out)
    return _Framed(ids, left_out, len(ids))


def _cut(tokenised: Tokenised, truncation: Truncation, most: int) -> list[int]:
    """The tokens that are read; all that there are, where none may be left out."""
    ids, most = tokenised.ids, max(most, 0)
    if truncation is Truncation.NONE or len(ids) <= most:
        return ids
    return ids[:most] if truncation is Truncation.END else ids[len(ids) - most :]
