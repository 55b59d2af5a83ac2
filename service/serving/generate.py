"""`Generate` and `Tokens`: from a checked request to a stream of events."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec

from tokenpod.core.messages import Ready, Request, StoppingParams
from tokenpod.protos.generate.v3 import generate_pb2 as pb
from tokenpod.service.config import ServerSettings
from tokenpod.service.dialects import convert, validate
from tokenpod.service.dialects.events import EventWriter
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.rpc.admission import Admission, Place
from tokenpod.service.rpc.errors import FailedPrecondition
from tokenpod.service.rpc.memory_budget import Lease
from tokenpod.service.serving.calls import ID_BYTES, GenerateCall, TokensCall, prompt_bytes
from tokenpod.service.serving.generation import Generation, Sample
from tokenpod.service.telemetry.recorder import Telemetry
from tokenpod.service.text.encoder import Encoder, Tokenised
from tokenpod.service.text.stops import StopMatcher
from tokenpod.service.text.tokenizer import Tokenizer

log = logging.getLogger("tokenpod.generate")

#: A deadline beyond is none: it would not fit into 64 bits of nanoseconds.
_FOREVER_SECONDS = 1e9
_REQUEST_ID_KEY = "x-request-id"


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known once the model is ready."""

    client: EngineClient
    encoder: Encoder
    limits: validate.RequestLimits
    model_id: str
    #: Where the pod that generates is; "": it is this one.
    leader_address: str = ""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.encoder.tokenizer


def request_limits(settings: ServerSettings, ready: Ready) -> validate.RequestLimits:
    """What one request may ask for, by the operator's word and the model's."""
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
    """The rpcs for applications.

    Args:
        admission: the bounded queue.
        telemetry: where spans and metrics go.
    """

    def __init__(self, admission: Admission, telemetry: Telemetry) -> None:
        self._admission = admission
        self._telemetry = telemetry
        self._serving: Serving | None = None

    def start(self, serving: Serving) -> None:
        """The model is ready."""
        self._serving = serving
        self._admission.turnover.watch(serving.client, serving.limits.rows)

    def check(self, method: str, seconds: float | None = None) -> Lease | None:
        """Raise what a call would be refused with, whatever it asks.

        Args:
            seconds: until its deadline; None: it has none.

        Returns:
            Memory for the message of a `Generate` or `Tokens`; other calls need none to speak of.
        """
        if not method.endswith(("/Generate", "/Tokens")):
            return None
        self._admission.check_room(seconds if method.endswith("/Generate") else None)
        return self._admission.expect()

    async def generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Write the stream of one `Generate` call.

        It writes where a generator would yield: each layer around a generator is another switch a
        token.
        """
        arrived_at = time.monotonic_ns()
        recorded = self._telemetry.current_call()
        with (
            self._admission.enter(context.time_remaining()) as place,
            contextlib.ExitStack() as stack,
        ):
            place.line_up()
            serving = self._ready()
            if serving.leader_address:
                raise FailedPrecondition(
                    f"this pod follows: ask the leader at {serving.leader_address}"
                )
            call = await convert.generate_call(request)
            validate.check_generate(call, serving.limits)
            lease = stack.enter_context(self._admission.memory.reserve(prompt_bytes(call.prompt)))
            request_id = _request_id(call, context)
            await context.send_initial_metadata(((_REQUEST_ID_KEY, request_id),))
            generation = await self._submit(serving, call, context, place, lease, arrived_at)
            writer = EventWriter(
                call,
                generation,
                serving.tokenizer,
                model_id=serving.model_id,
                request_id=request_id,
            )
            try:
                while not writer.done:
                    await generation.news()
                    while (event := writer.next()) is not None:
                        await context.write(event)
            finally:
                generation.cancel()
                if (seconds := generation.ran_seconds) is not None:
                    self._admission.turnover.note(seconds)
                self._report(request_id, generation, writer)
                if recorded is not None:
                    recorded.generated(generation, model_id=serving.model_id, request_id=request_id)

    async def tokens(self, call: TokensCall) -> Tokenised:
        """The tokens of a text or chat; their ids only if the call wants them.

        It takes a place as `Generate` does: tokenising costs no less here.
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

    async def _submit(
        self,
        serving: Serving,
        call: GenerateCall,
        context: grpc.aio.ServicerContext[Any, Any],
        place: Place,
        lease: Lease,
        arrived_at: int,
    ) -> Generation:
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
        place.queue(len(prompt))
        remaining, deadline_at, begin_by = context.time_remaining(), None, None
        if remaining is not None and remaining < _FOREVER_SECONDS:
            now = time.monotonic_ns()
            deadline_at = now + int(remaining * 1e9)
            within = self._admission.turnover.begin_within(remaining, new_tokens)
            begin_by = now + int(within * 1e9)
        request = self._engine_request(serving, call, prompt, new_tokens, samples, arrived_at)
        request = msgspec.structs.replace(request, deadline_at=deadline_at, begin_by=begin_by)
        generation = Generation(
            request,
            _samples(serving.tokenizer, call, request),
            streamed=call.output.stream,
            step_at=lambda: serving.client.step_at,
            abort=serving.client.abort,
            on_begin=place.leave_queue,
            on_size=_counted(lease),
        )
        serving.client.submit(request, generation)
        return generation

    def _engine_request(
        self,
        serving: Serving,
        call: GenerateCall,
        prompt: list[int],
        new_tokens: int,
        samples: int,
        arrived_at: int,
    ) -> Request:
        seed = call.sampling.seed
        stopping = call.stopping
        limit = stopping.time_limit_ms
        eos = frozenset() if stopping.ignore_eos else serving.tokenizer.eos_token_ids
        return Request(
            sequence_ids=serving.client.new_sequence_ids(samples),
            prompt=prompt,
            sampling=validate.sampling_params(
                call.sampling, secrets.randbits(64) if seed is None else seed
            ),
            stopping=StoppingParams(
                max_new_tokens=new_tokens,
                min_new_tokens=min(stopping.min_new_tokens, new_tokens),
                eos_token_ids=eos,
                stop_token_ids=frozenset(stopping.stop_token_ids),
                time_limit_at=arrived_at + limit * 1_000_000 if limit else None,
            ),
            logprobs=call.output.logprobs or samples > 1,
            top_n_tokens=call.output.top_n_tokens,
            prompt_logprobs=call.output.prompt_logprobs,
            priority=call.priority,
            arrived_at=arrived_at,
        )

    def _report(self, request_id: str, generation: Generation, writer: EventWriter) -> None:
        """One line for a call; never its text."""
        usage = writer.usage()
        log.info(
            "generate",
            extra={
                "request_id": request_id,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "generated_tokens": usage.generated_tokens,
                "finished": generation.finished,
            },
        )


def _counted(lease: Lease) -> Callable[[int], None]:
    """Counts a call's answer, as far as it is kept, besides its prompt."""
    prompt = lease.size
    return lambda answer: lease.resize(prompt + answer)


def _request_id(call: GenerateCall, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The field, else the metadata, else a new one."""
    if call.request_id:
        return call.request_id
    for key, value in context.invocation_metadata() or ():
        if key == _REQUEST_ID_KEY and value:
            named = value if isinstance(value, str) else value.decode("ascii", "replace")
            validate.check_request_id(named, f"metadata {_REQUEST_ID_KEY}")
            return named
    return uuid.uuid4().hex


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
