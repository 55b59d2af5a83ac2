"""Streams of text for the protocols that have them: from a call to a running generation.

    with service.admit() as admitted:                a place in the bounded queue
        admitted.check(call)                         limits, and memory for the prompt
        generation = await admitted.submit(call)     tokenised, and handed to the engine
        ... write what it brings ...                 the protocol's own part

No module here knows a message of a protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence

from msgspec import structs

from tokenpod.core.messages import AdapterFacts, Ready
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.task import Task
from tokenpod.service.admission.admission import Admission, Place, RequestStream
from tokenpod.service.admission.aside import Aside
from tokenpod.service.admission.counters import NamedCalls
from tokenpod.service.admission.memory_budget import Lease
from tokenpod.service.calls.call import (
    ID_BYTES,
    GenerateCall,
    TokensCall,
    check_allowed,
    deadline_of,
    prompt_bytes,
    sampling_params,
)
from tokenpod.service.calls.errors import AlreadyExists, NotFound, Unimplemented
from tokenpod.service.calls.generation import Generation
from tokenpod.service.calls.limits import (
    MOST_RETURNED_IDS,
    NeverFits,
    RequestLimits,
    beam_tops,
    check_detokenize,
    check_generate,
    check_group,
    check_prompt_tops,
    check_returned_ids,
    check_tokens,
    max_new_tokens,
)
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.serving.adapters import Adapters, with_adapter
from tokenpod.service.serving.cache_feed import CacheFeed
from tokenpod.service.serving.images import Images, SeenImages
from tokenpod.service.serving.serving import Serving, request_limits
from tokenpod.service.telemetry.server_calls import ServerCall, current_call
from tokenpod.service.text.bad_words import token_runs
from tokenpod.service.text.encoder import Encoder, Tokenised
from tokenpod.service.text.parsers.turn import formats_of
from tokenpod.service.text.tokenizer_archive import TokenizerArchive
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

#: Tokens that are decoded before others get their turn: a few milliseconds of the slowest decoder.
_SLICE_TOKENS = 128
#: Characters of a name that an error repeats.
_MOST_SHOWN = 100


class GenerateService:
    """Admits calls that generate text, and tokenises."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._serving: Serving | None = None
        #: Where calls have done what would hold up the event loop.
        self.aside = Aside()
        #: Calls that can be ended by their names.
        self.named = NamedCalls(admission.counters.names)

    def start(
        self, settings: ServerSettings, client: EngineClient, encoder: Encoder, ready: Ready
    ) -> Serving:
        """The model is ready."""
        if self._serving is not None:
            self._serving.archive.release()
        limits = request_limits(settings, ready)
        self._admission.max_requests = settings.requests_taken(limits.rows)
        self._admission.max_queue_tokens = settings.resolved_queue_tokens(ready.slots)
        self._admission.turnover.watch(client, limits.rows)
        formats = formats_of(
            encoder.tokenizer.template_source, settings.tool_parser, settings.reasoning_parser
        )
        told = ready.adapters if client.adapters is None else client.adapters
        changing = settings.adapter_token_file is not None
        adapters = Adapters(settings.resolved_adapters, told, changing=changing)
        client.on_adapters = adapters.hear
        self._serving = Serving(
            client,
            encoder,
            limits,
            settings,
            ready,
            CacheFeed(client),
            formats,
            TokenizerArchive(encoder, self._admission.memory, self.aside),
            Images(encoder.images if ready.images else None, client),
            adapters,
            settings.served_name,
        )
        return self._serving

    @property
    def task(self) -> Task | None:
        """What the model is for; None: it is not ready yet."""
        return None if self._serving is None else self._serving.ready.task

    @property
    def serving(self) -> Serving:
        """What is served. For methods whose gate asks whether the model is ready."""
        assert self._serving is not None, "the gate asks whether the model is ready"
        return self._serving

    def check_model(self, name: str) -> None:
        """Raise NotFound unless a client that names this model means the one that is served."""
        served = self.serving.model_id
        if name and name != served:
            shown = f"{name[:_MOST_SHOWN]}..." if len(name) > _MOST_SHOWN else name
            problem = f"there is no model {shown!r}; this server has {served!r}"
            raise NotFound("model", shown, problem)

    @contextlib.contextmanager
    def admit(self, remaining: float | None) -> Iterator[AdmittedCall]:
        """Hold a place for one call; what it generates is cancelled and reported at the end.

        Args:
            remaining: seconds until its deadline; None: it has none.

        Raises Unavailable or ResourceExhausted at once if there is no place, or no row in time.
        """
        arrived_at = time.monotonic_ns()
        recorded = current_call()
        with self._admission.enter(remaining) as place:
            place.line_up()
            serving = self._ready()
            admitted = AdmittedCall(
                serving, self._admission, place, self.named, arrived_at, recorded
            )
            try:
                yield admitted
            finally:
                admitted.end()

    async def tokens(self, call: TokensCall, stream: RequestStream | None = None) -> Tokenised:
        """The tokens of a text or chat; their ids only if the call wants them.

        It takes a place as a generation does: tokenising costs no less here. `stream`: whose
        request it is, if not the call's only one.
        """
        with self._admission.enter(stream=stream):
            serving = self._ready()
            check_tokens(call, serving.limits)
            serving.images.check(call.images)
            size = prompt_bytes(call.prompt) + serving.images.bytes_of(call.images)
            with self._admission.memory.reserve(size) as lease:
                seen = await serving.images.read(call.images)
                # What an image becomes is not wanted, but how many tokens.
                seen.close()
                tokenised = await serving.encoder.encode(
                    call.prompt,
                    keep=MOST_RETURNED_IDS if call.return_ids or call.return_offsets else 0,
                    special=call.add_special_tokens,
                    offsets=call.return_offsets,
                    images=seen.images,
                )
                if call.return_ids or call.return_offsets:
                    check_returned_ids(tokenised.count)
                lease.resize(lease.size + ID_BYTES * (len(tokenised.ids) + len(tokenised.offsets)))
                return tokenised

    async def text_of(
        self, ids: Sequence[int], *, skip_special: bool, stream: RequestStream | None = None
    ) -> str:
        """The text of tokens. Other tasks get their turn while many are decoded.

        It takes a place as `tokens` does. Raises InvalidArgument for ids of no token.
        """
        with self._admission.enter(stream=stream):
            serving = self._ready()
            check_detokenize(ids, serving.limits)
            with self._admission.memory.reserve(ID_BYTES * len(ids)):
                detokenizer = serving.tokenizer.detokenizer((), skip_special=skip_special)
                parts: list[str] = []
                for at in range(0, len(ids), _SLICE_TOKENS):
                    if at:
                        await asyncio.sleep(0)
                    parts += map(detokenizer.push, ids[at : at + _SLICE_TOKENS])
                return "".join([*parts, detokenizer.finish()])

    def _ready(self) -> Serving:
        self._admission.check_open()
        assert self._serving is not None, "admission opens once the model is ready"
        return self._serving


class AdmittedCall:
    """A call that holds a place: checked, tokenised, handed to the engine, and reported.

    Args:
        serving: engine, tokenizer and limits.
        admission: memory of the front ends, and how long calls take.
        place: the call's in the queue.
        named: calls that can be ended by their names.
        arrived_at: CLOCK_MONOTONIC nanoseconds.
        recorded: its record in telemetry; None: it has none.
    """

    def __init__(
        self,
        serving: Serving,
        admission: Admission,
        place: Place,
        named: NamedCalls,
        arrived_at: int,
        recorded: ServerCall | None,
    ) -> None:
        self._serving = serving
        self._admission = admission
        self._place = place
        self._named = named
        self._arrived_at = arrived_at
        self._recorded = recorded
        self._lease: Lease | None = None
        #: Bytes of what the client asks for, as text and as tokens.
        self._asked_bytes = 0
        self._generation: Generation | None = None
        self._seen: SeenImages | None = None
        self._name: int | None = None
        #: Its end was asked for, by its name.
        self._unwanted = False
        self._adapter = ""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._serving.tokenizer

    @property
    def model_id(self) -> str:
        """The model's name for clients."""
        return self._serving.model_id

    def hold_name(self, caller: str, request_id: str) -> None:
        """Be the only call of this caller with this id; raises AlreadyExists if there is one."""
        self._name = self._named.hold(f"{caller} {request_id}", self._stop)
        if self._name is None:
            problem = f"request_id is {request_id!r}; a call of that name is under way"
            raise AlreadyExists("call", request_id, problem)

    @property
    def limits(self) -> RequestLimits:
        """What a request may ask for."""
        return self._serving.limits

    def check(self, call: GenerateCall, limits: RequestLimits | None = None) -> None:
        """Check what can be said before tokenising, and count the prompt's memory.

        `limits`: a protocol's own, where it promises other ones.

        Raises InvalidArgument, NotFound or ResourceExhausted.
        """
        self._adapter_of(call)
        check_generate(call, limits or self._serving.limits)
        self._serving.check_tools(call)
        size = prompt_bytes(call.prompt)
        if call.images:
            self._serving.images.check(call.images)
            size += self._serving.images.bytes_of(call.images)
        if call.tensors is not None:
            size += call.tensors.size
        self._lease = self._admission.memory.reserve(size)

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
        if self._recorded is not None:
            self._recorded.named(request_id, call.labels)
        deadline_at = deadline_of(remaining)
        serving, lease = self._serving, self._lease
        most = serving.limits.max_input_tokens
        if call.images:
            self._seen = await serving.images.read(call.images)
            lease.resize(lease.size + self._seen.file_bytes)
        seen = self._seen
        tokenised = await serving.encoder.encode(
            call.prompt,
            keep=min(call.truncate or most, most),
            calls=serving.called_by(call),
            images=seen.images if seen is not None else (),
        )
        prompt = tokenised.ids
        before = self._adapter_of(call)
        new_tokens = self._new_tokens(call, tokenised.count, len(prompt), before)
        if call.tensors is not None:
            seen = self._seen = await serving.images.read_tensors(call.tensors, prompt)
            lease.resize(lease.size + seen.file_bytes)
        check_prompt_tops(len(prompt), call.output.prompt_top_n_tokens)
        bad_words = list[list[int]]()
        if call.sampling.bad_words:
            bad_words = await token_runs(call.sampling, serving.encoder, serving.limits)
        constraint = await serving.conforming(call, tokenised)
        self._asked_bytes = lease.size + ID_BYTES * (len(prompt) + sum(map(len, bad_words)))
        lease.resize(self._asked_bytes)
        self._place.queue(len(prompt))
        images = await seen.encoded(prompt) if seen is not None else None
        # Found again at the last moment: what has been replaced meanwhile is not asked for.
        adapter = self._adapter_of(call)
        if adapter is not before:
            new_tokens = self._new_tokens(call, tokenised.count, len(prompt), adapter)
        request = self._engine_request(call, prompt, new_tokens, bad_words, deadline_at)
        if adapter is not None:
            request = with_adapter(request, adapter)
        if images is not None:
            request = structs.replace(request, images=images)
        if constraint is not None and call.beam is not None:
            field = call.constraint.field if call.constraint else "chat.tool_choice"
            raise Unimplemented(field, "is not supported beside sampling.beam")
        constrained = ""
        if constraint is not None:
            constrained = call.constraint.field if call.constraint else "constraint"
        generation = Generation(
            request,
            serving.samples_of(call, request, tokenised.rendered_end),
            self,
            streamed=call.output.stream,
            failures_last=call.failures_last,
            constraint_field=constrained,
        )
        # The engine alone keeps the constraint, which may be megabytes of patterns.
        serving.client.submit(structs.replace(request, constraint=constraint), generation)
        if seen is not None:
            seen.close()
        self._generation, self._adapter = generation, call.adapter
        if self._recorded is not None and call.adapter:
            self._recorded.adapts(call.adapter)
        if self._unwanted:
            generation.end()
        return generation

    def _adapter_of(self, call: GenerateCall) -> AdapterFacts | None:
        """The adapter that a call names; None: it names none. Raises NotFound."""
        return self._serving.adapters.find(call.adapter) if call.adapter else None

    def _new_tokens(
        self, call: GenerateCall, asked: int, kept: int, adapter: AdapterFacts | None
    ) -> int:
        """How many tokens each sample may generate, of a prompt of `asked` tokens, `kept` of them.

        Raises NeverFits, or InvalidArgument where there is no token.
        """
        limits, stopping = self._serving.limits, call.stopping
        virtual = 0 if adapter is None else adapter.virtual_tokens
        try:
            new_tokens = max_new_tokens(
                min(asked, call.truncate or asked),
                stopping.max_new_tokens,
                limits,
                shorten=stopping.shorten,
                virtual_tokens=virtual,
            )
            check_group(virtual + kept, new_tokens, call, limits)
        except NeverFits:
            self._admission.counters.add(ignored=1)
            raise
        return new_tokens

    def end(self) -> None:
        """Cancel what still runs and report the call; its memory is free."""
        if self._generation is not None:
            self._generation.cancel()
        if self._seen is not None:
            self._seen.close()
        if self._lease is not None:
            self._lease.release()
        if self._name is not None:
            self._named.give_back(self._name)
        # Last: what a report raises must not keep memory or a name from other calls.
        if self._generation is not None:
            if (seconds := self._generation.ran_seconds) is not None:
                self._admission.turnover.note(seconds)
            self._report(self._generation)

    # -- Carrier -------------------------------------------------------------------------------

    @property
    def step_at(self) -> int:
        """CLOCK_MONOTONIC nanoseconds at which the step being handed over settled."""
        return self._serving.client.step_at

    def abort(self, sequence_ids: list[int], *, stopped: bool = False) -> None:
        """End these in the engine; `stopped`: their outputs are complete."""
        self._serving.client.abort(sequence_ids, stopped=stopped)

    def begun(self) -> None:
        """The prompt has been computed: it waits no longer."""
        self._place.leave_queue()

    def keeps(self, size: int) -> None:
        """Count the answer, as far as it is kept, besides what the client asks for."""
        if self._lease is not None:
            self._lease.resize(self._asked_bytes + size)

    # -- details -------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End the call; what has come so far is its answer."""
        self._unwanted = True
        if self._generation is not None:
            self._generation.end()

    def _report(self, generation: Generation) -> None:
        if self._recorded is not None:
            self._recorded.generated(
                generation,
                model_id=self._serving.model_id,
                adapter=self._adapter,
                quantization=self._serving.ready.quantization,
            )

    def _engine_request(
        self,
        call: GenerateCall,
        prompt: list[int],
        new_tokens: int,
        bad_words: list[list[int]],
        deadline_at: int | None,
    ) -> Request:
        serving, stopping, seed = self._serving, call.stopping, call.sampling.seed
        limit = stopping.time_limit_ns
        eos = frozenset() if stopping.ignore_eos else serving.tokenizer.eos_token_ids
        check_allowed(call, eos, bad_words)
        ends = frozenset(stopping.stop_token_ids)
        top_n_tokens = call.output.top_n_tokens
        if call.beam is not None:
            top_n_tokens = beam_tops(call.beam, len(eos | ends), serving.limits)
        return Request(
            sequence_ids=serving.client.new_sequence_ids(call.sequences),
            prompt=prompt,
            sampling=sampling_params(
                call.sampling, secrets.randbits(64) if seed is None else seed, stopping, bad_words
            ),
            stopping=StoppingParams(
                max_new_tokens=new_tokens,
                min_new_tokens=min(stopping.min_new_tokens, new_tokens),
                eos_token_ids=eos,
                stop_token_ids=ends,
                time_limit_at=self._arrived_at + limit if limit else None,
            ),
            logprobs=call.output.logprobs or call.sequences > 1,
            top_n_tokens=top_n_tokens,
            ranks=call.output.ranks,
            prompt_logprobs=call.output.scores_prompt,
            prompt_top_n_tokens=min(call.output.prompt_top_n_tokens, serving.limits.vocab_size),
            prompt_ranks=call.output.prompt_ranks,
            priority=call.priority,
            arrived_at=self._arrived_at,
            deadline_at=deadline_at,
            begin_by=self._begin_by(deadline_at, new_tokens),
            salt=call.salt,
            beam=call.beam,
            drafts=self.limits.drafts if call.max_draft_tokens is None else call.max_draft_tokens,
        )

    def _begin_by(self, deadline_at: int | None, new_tokens: int) -> int | None:
        """When it would be too late to begin."""
        if deadline_at is None:
            return None
        left = (deadline_at - time.monotonic_ns()) / 1e9
        within = self._admission.turnover.begin_within(left, new_tokens)
        return deadline_at - int((left - within) * 1e9)
