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
import time
from collections.abc import Iterator, Sequence

from tokenpod.core.messages import Ready
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.named import NamedCalls
from tokenpod.service.calls.call import ID_BYTES, TokensCall, prompt_bytes
from tokenpod.service.calls.errors import NotFound
from tokenpod.service.calls.limits import (
    MOST_RETURNED_IDS,
    check_detokenize,
    check_returned_ids,
    check_tokens,
)
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.serving.adapters import Adapters
from tokenpod.service.serving.admitted import AdmittedCall
from tokenpod.service.serving.cache_feed import CacheFeed
from tokenpod.service.serving.serving import Serving, request_limits
from tokenpod.service.telemetry.recorder import Telemetry
from tokenpod.service.text.encoder import Encoder, Tokenised
from tokenpod.service.text.parsers.turn import formats_of
from tokenpod.service.text.tokenizer_archive import TokenizerArchive

#: Tokens that are decoded before others get their turn: a few milliseconds of the slowest decoder.
_SLICE_TOKENS = 128
#: Characters of a name that an error repeats.
_MOST_SHOWN = 100


class GenerateService:
    """Admits calls that generate text, and tokenises."""

    def __init__(self, admission: Admission, telemetry: Telemetry) -> None:
        self._admission = admission
        self._telemetry = telemetry
        self._serving: Serving | None = None
        #: Calls that can be ended by their names.
        self.named = NamedCalls(admission.counters.names)

    def start(
        self, settings: ServerSettings, client: EngineClient, encoder: Encoder, ready: Ready
    ) -> Serving:
        """The model is ready."""
        if self._serving is not None:
            self._serving.archive.release()
        limits = request_limits(settings, ready)
        self._admission.max_queue_tokens = settings.resolved_queue_tokens(ready.slots)
        self._admission.turnover.watch(client, limits.rows)
        formats = formats_of(
            encoder.tokenizer.template_source, settings.tool_parser, settings.reasoning_parser
        )
        told = ready.adapters if client.adapters is None else client.adapters
        changing = settings.adapter_token_file is not None
        adapters = Adapters(settings.resolved_adapters, told, changing=changing)
        client.on_adapters = lambda told: adapters.take(told.loaded)
        self._serving = Serving(
            client,
            encoder,
            limits,
            settings,
            ready,
            CacheFeed(client),
            formats,
            TokenizerArchive(encoder, self._admission.memory),
            adapters,
        )
        return self._serving

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
        recorded = self._telemetry.current_call()
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

    async def tokens(self, call: TokensCall) -> Tokenised:
        """The tokens of a text or chat; their ids only if the call wants them.

        It takes a place as a generation does: tokenising costs no less here.
        """
        with self._admission.enter():
            serving = self._ready()
            check_tokens(call, serving.limits)
            with self._admission.memory.reserve(prompt_bytes(call.prompt)) as lease:
                tokenised = await serving.encoder.encode(
                    call.prompt,
                    keep=MOST_RETURNED_IDS if call.return_ids or call.return_offsets else 0,
                    special=call.add_special_tokens,
                    offsets=call.return_offsets,
                )
                if call.return_ids or call.return_offsets:
                    check_returned_ids(tokenised.count)
                lease.resize(lease.size + ID_BYTES * (len(tokenised.ids) + len(tokenised.offsets)))
                return tokenised

    async def text_of(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of tokens. Other tasks get their turn while many are decoded.

        It takes a place as a generation does. Raises InvalidArgument for ids of no token.
        """
        with self._admission.enter():
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
