"""Streams of text for the protocols that have them: from a call to a running generation.

    with service.admit() as admitted:                a place in the bounded queue
        admitted.check(call)                         limits, and memory for the prompt
        generation = await admitted.submit(call)     tokenised, and handed to the engine
        ... write what it brings ...                 the protocol's own part

No module here knows a message of a protocol.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenpod.core.messages import Ready, Request, StoppingParams
from tokenpod.service.config import ServerSettings
from tokenpod.service.dialects import validate
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.rpc.admission import Admission, Place
from tokenpod.service.rpc.memory_budget import Lease
from tokenpod.service.serving.calls import ID_BYTES, GenerateCall, TokensCall, prompt_bytes
from tokenpod.service.serving.generation import Generation, Sample
from tokenpod.service.serving.sampling import sampling_params
from tokenpod.service.telemetry.recorder import Telemetry
from tokenpod.service.text.encoder import Encoder, Tokenised
from tokenpod.service.text.stops import StopMatcher
from tokenpod.service.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenpod.service.telemetry.tracing import ServerCall

log = logging.getLogger("tokenpod.generate")

#: A deadline beyond is none: it would not fit into 64 bits of nanoseconds.
_FOREVER_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Serving:
    """Engine, tokenizer and limits, once the model is ready."""

    client: EngineClient
    encoder: Encoder
    limits: validate.RequestLimits
    model_id: str

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.encoder.tokenizer


def request_limits(settings: ServerSettings, ready: Ready) -> validate.RequestLimits:
    """What one request may ask for, by the operator's settings and the model's."""
    total = min(settings.max_total_tokens or ready.max_positions, ready.max_positions, ready.slots)
    return validate.RequestLimits(
        vocab_size=ready.vocab_size,
        max_input_tokens=min(settings.max_input_tokens or total - 1, total - 1),
        max_total_tokens=total,
        max_samples=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_stop_sequence_bytes=settings.max_stop_sequence_bytes,
        max_top_n_tokens=settings.max_top_n_tokens,
        max_logit_bias=settings.max_logit_bias,
        slots=ready.slots,
        rows=settings.resolved_batch_size,
    )


class GenerateService:
    """Admits calls that generate text, and tokenises."""

    def __init__(self, admission: Admission, telemetry: Telemetry) -> None:
        self._admission = admission
        self._telemetry = telemetry
        self._serving: Serving | None = None

    def start(
        self, settings: ServerSettings, client: EngineClient, encoder: Encoder, ready: Ready
    ) -> Serving:
        """The model is ready."""
        limits = request_limits(settings, ready)
        self._admission.max_queue_tokens = settings.resolved_queue_tokens(ready.slots)
        self._admission.turnover.watch(client, limits.rows)
        self._serving = Serving(client, encoder, limits, settings.model_id)
        return self._serving

    @contextlib.contextmanager
    def admit(self, remaining: float | None) -> Iterator[AdmittedCall]:
        """Hold a place for one call; what it generates is cancelled and reported at the end.

        Args:
            remaining: seconds until its deadline; None: it has none.

        Raises Unavailable or ResourceExhausted at once if there is no place, or no row in time.
        """
        arrived_at = time.monotonic_ns()
        recorded = self._telemetry.current_call()
        with self._admission.enter(remaining) as place:
            place.line_up()
            admitted = AdmittedCall(self._ready(), self._admission, place, arrived_at)
            try:
                yield admitted
            finally:
                admitted.end(recorded)

    async def tokens(self, call: TokensCall) -> Tokenised:
        """The tokens of a text or chat; their ids only if the call wants them.

        It takes a place as a generation does: tokenising costs no less here.
        """
        with self._admission.enter():
            serving = self._ready()
            validate.check_tokens(call)
            with self._admission.memory.reserve(prompt_bytes(call.prompt)) as lease:
                tokenised = await serving.encoder.encode(
                    call.prompt,
                    keep=validate.MOST_RETURNED_IDS if call.return_ids else 0,
                    special=call.add_special_tokens,
                )
                if call.return_ids:
                    validate.check_returned_ids(tokenised.count)
                lease.resize(lease.size + ID_BYTES * len(tokenised.ids))
                return tokenised

    def _ready(self) -> Serving:
        self._admission.check_open()
        assert self._serving is not None, "admission opens once the model is ready"
        return self._serving


class AdmittedCall:
    """A call that holds a place; see `GenerateService.admit`.

    Args:
        serving: engine, tokenizer and limits.
        admission: memory of the front ends, and how long calls take.
        place: the call's in the queue.
        arrived_at: CLOCK_MONOTONIC nanoseconds.
    """

    def __init__(
        self, serving: Serving, admission: Admission, place: Place, arrived_at: int
    ) -> None:
        self._serving = serving
        self._admission = admission
        self._place = place
        self._arrived_at = arrived_at
        self._lease: Lease | None = None
        self._generation: Generation | None = None
        self._request_id = ""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._serving.tokenizer

    def check(self, call: GenerateCall) -> None:
        """Check what can be said before tokenising, and count the prompt's memory.

        Raises InvalidArgument or ResourceExhausted.
        """
        validate.check_generate(call, self._serving.limits)
        self._lease = self._admission.memory.reserve(prompt_bytes(call.prompt))

    async def submit(
        self, call: GenerateCall, request_id: str, remaining: float | None
    ) -> Generation:
        """Tokenise a checked call and hand it to the engine; once.

        Args:
            call: what the client asks for.
            request_id: names the call in logs and traces.
            remaining: seconds until its deadline; None: it has none.

        Raises:
            InvalidArgument: the prompt is too long, or can't be tokenised.
            ResourceExhausted: too many prompt tokens wait.
        """
        assert self._lease is not None, "a call is checked before it is submitted"
        deadline_at = None
        if remaining is not None and remaining < _FOREVER_SECONDS:
            deadline_at = time.monotonic_ns() + int(remaining * 1e9)
        serving, lease = self._serving, self._lease
        most = serving.limits.max_input_tokens
        tokenised = await serving.encoder.encode(call.prompt, keep=min(call.truncate or most, most))
        new_tokens = validate.max_new_tokens(
            min(tokenised.count, call.truncate or tokenised.count),
            call.stopping.max_new_tokens,
            serving.limits,
        )
        prompt = tokenised.ids
        lease.resize(lease.size + ID_BYTES * len(prompt))
        samples = call.sampling.best_of or call.sampling.n or 1
        validate.check_group(len(prompt), new_tokens, samples, serving.limits)
        self._place.queue(len(prompt))
        request = self._engine_request(call, prompt, new_tokens, samples, deadline_at)
        generation = Generation(
            request,
            _samples(serving.tokenizer, call, request),
            streamed=call.output.stream,
            step_at=lambda: serving.client.step_at,
            abort=serving.client.abort,
            on_begin=self._place.leave_queue,
            on_size=_counted(lease),
        )
        serving.client.submit(request, generation)
        self._generation, self._request_id = generation, request_id
        return generation

    def end(self, recorded: ServerCall | None) -> None:
        """Cancel what still runs and report the call; its memory is free.

        Args:
            recorded: the call's record in telemetry; None: it has none.
        """
        if self._generation is not None:
            self._generation.cancel()
            if (seconds := self._generation.ran_seconds) is not None:
                self._admission.turnover.note(seconds)
            self._report(self._generation, recorded)
        if self._lease is not None:
            self._lease.release()

    def _report(self, generation: Generation, recorded: ServerCall | None) -> None:
        # One line for a call; never its text.
        log.info(
            "generate",
            extra={
                "request_id": self._request_id,
                "prompt_tokens": len(generation.request.prompt),
                "cached_tokens": generation.cached_tokens,
                "generated_tokens": generation.generated_tokens,
                "finished": generation.finished,
            },
        )
        if recorded is not None:
            model_id, request_id = self._serving.model_id, self._request_id
            recorded.generated(generation, model_id=model_id, request_id=request_id)

    def _engine_request(
        self,
        call: GenerateCall,
        prompt: list[int],
        new_tokens: int,
        samples: int,
        deadline_at: int | None,
    ) -> Request:
        serving, stopping, seed = self._serving, call.stopping, call.sampling.seed
        limit = stopping.time_limit_ms
        eos = frozenset() if stopping.ignore_eos else serving.tokenizer.eos_token_ids
        return Request(
            sequence_ids=serving.client.new_sequence_ids(samples),
            prompt=prompt,
            sampling=sampling_params(call.sampling, secrets.randbits(64) if seed is None else seed),
            stopping=StoppingParams(
                max_new_tokens=new_tokens,
                min_new_tokens=min(stopping.min_new_tokens, new_tokens),
                eos_token_ids=eos,
                stop_token_ids=frozenset(stopping.stop_token_ids),
                time_limit_at=self._arrived_at + limit * 1_000_000 if limit else None,
            ),
            logprobs=call.output.logprobs or samples > 1,
            top_n_tokens=call.output.top_n_tokens,
            prompt_logprobs=call.output.prompt_logprobs,
            priority=call.priority,
            arrived_at=self._arrived_at,
            deadline_at=deadline_at,
            begin_by=self._begin_by(deadline_at, new_tokens),
        )

    def _begin_by(self, deadline_at: int | None, new_tokens: int) -> int | None:
        """When it would be too late to begin."""
        if deadline_at is None:
            return None
        left = (deadline_at - time.monotonic_ns()) / 1e9
        within = self._admission.turnover.begin_within(left, new_tokens)
        return deadline_at - int((left - within) * 1e9)


def _counted(lease: Lease) -> Callable[[int], None]:
    """Counts a call's answer, as far as it is kept, besides its prompt."""
    prompt = lease.size
    return lambda answer: lease.resize(prompt + answer)


def _samples(tokenizer: Tokenizer, call: GenerateCall, request: Request) -> Sequence[Sample]:
    stopping = call.stopping
    return [
        Sample(
            index=index,
            sequence_id=sequence_id,
            detokenizer=tokenizer.detokenizer(request.prompt),
            stops=StopMatcher(stopping.stop_sequences, include=stopping.include_stop_sequence),
            min_new_tokens=stopping.min_new_tokens,
            streamed=call.output.stream,
        )
        for index, sequence_id in enumerate(request.sequence_ids)
    ]
