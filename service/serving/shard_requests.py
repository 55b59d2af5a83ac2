"""A router's requests: checked, tokenised and made into the engine's.

The protocol knows no failure of one request, so one that can't be served ends alone, with no text,
while the rest of its batch goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from msgspec import structs

from tokenpod.core.constraints import Constraint
from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.service.calls.call import (
    ShardBatch,
    ShardGeneration,
    ShardRequest,
    shard_sampling_params,
)
from tokenpod.service.calls.errors import FieldError, Internal, InvalidArgument
from tokenpod.service.images.inline import cut_out
from tokenpod.service.serving import shard_checks as checks
from tokenpod.service.serving.adapters import with_adapter
from tokenpod.service.serving.images import SeenImages
from tokenpod.service.serving.routed import RoutedSequence, ended_alone
from tokenpod.service.serving.serving import Serving
from tokenpod.service.text.encoder import Tokenised
from tokenpod.service.text.workers.text_messages import Text

log = logging.getLogger("tokenpod.shard")

#: A router's liveness probe: its batch, and the request in it.
_LIVENESS_ID = 2**64 - 1
#: Requests that are opened before others get their turn.
_SLICE = 64
#: Names of models that are remembered, so that each is logged once.
_MOST_NAMES = 1000


@dataclass(frozen=True, slots=True)
class Opened:
    """What a batch's requests have become. Nothing exists in the engine yet."""

    #: Parallel.
    requests: list[Request] = field(default_factory=list)
    sequences: list[RoutedSequence] = field(default_factory=list)
    #: How those that can't be served end.
    refused: list[ShardGeneration] = field(default_factory=list)
    #: The images of all.
    seen: list[SeenImages] = field(default_factory=list)

    def close(self) -> None:
        """The engine has the requests, or will not have them."""
        for seen in self.seen:
            seen.close()


def is_probe(batch: ShardBatch) -> bool:
    """Whether a batch is a router's liveness probe: one token of one request."""
    if batch.id != _LIVENESS_ID or len(batch.requests) != 1:
        return False
    (request,) = batch.requests
    return (request.id, request.max_new_tokens) == (_LIVENESS_ID, 1)


async def _turn(at: int) -> None:
    """Give others their turn now and then: a batch may have thousands of requests."""
    if at % _SLICE == _SLICE - 1:
        await asyncio.sleep(0)


class ShardRequests:
    """Checks and tokenises what routers send."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._models: set[str] = set()

    async def open(self, batch: ShardBatch, opened: Opened) -> None:
        """Add all requests of a batch. Raises InvalidArgument if it makes no sense as a whole."""
        checks.check_batch(batch)
        limits = self._serving.limits
        good: list[tuple[int, ShardRequest]] = []
        seen: list[SeenImages] = []
        texts: list[Text] = []
        for at, asked in enumerate(batch.requests):
            await _turn(at)
            try:
                checks.check_request(asked, at, limits)
                images, inputs = await self._seen(asked, opened)
                texts.append(self._text(asked, inputs, limits.max_total_tokens))
                seen.append(images)
                good.append((at, asked))
            except Exception as problem:
                opened.refused.append(self._refuse(asked, problem))
        prompts = await self._serving.encoder.encode_all(texts, field="inputs")
        for (at, asked), prompt, images in zip(good, prompts, seen, strict=True):
            await _turn(at)
            try:
                request, sequence = await self._opened(asked, at, prompt, images)
            except Exception as problem:
                opened.refused.append(self._refuse(asked, problem))
                continue
            opened.requests.append(request)
            opened.sequences.append(sequence)

    async def open_probe(self, asked: ShardRequest) -> tuple[Request, RoutedSequence]:
        """The request of a liveness probe. Raises InvalidArgument."""
        checks.check_request(asked, 0, self._serving.limits)
        text = self._text(asked, asked.inputs, PROBE_TOKENS - 1)
        (prompt,) = await self._serving.encoder.encode_all([text], field="inputs")
        if isinstance(prompt, InvalidArgument):
            raise prompt
        request = self._request(asked, prompt.ids, probe=True)
        return request, RoutedSequence(asked, request, self._serving.tokenizer)

    async def _seen(self, asked: ShardRequest, opened: Opened) -> tuple[SeenImages, str]:
        """A request's images, and its text with what stands for them. A model for text skips them.

        Raises InvalidArgument or Unavailable.
        """
        service, inputs = self._serving.images, asked.inputs
        if not service.served:
            return await service.read(()), inputs
        images, places = asked.images, asked.image_places
        if not images and "](data:" in inputs:
            # Routers that know no chunks.
            inputs, images, places = await asyncio.to_thread(cut_out, inputs, "inputs")
        seen = await service.read(images)
        opened.seen.append(seen)
        return seen, seen.within(inputs, places, "inputs")

    @staticmethod
    def _text(asked: ShardRequest, inputs: str, most: int) -> Text:
        keep = min(asked.truncate or most, most)
        return Text(inputs, asked.add_special_tokens, keep)

    async def _opened(
        self,
        asked: ShardRequest,
        at: int,
        prompt: Tokenised | InvalidArgument,
        seen: SeenImages,
    ) -> tuple[Request, RoutedSequence]:
        """Request number `at` of a batch. Raises InvalidArgument or Unimplemented."""
        if isinstance(prompt, InvalidArgument):
            raise prompt
        count = min(prompt.count, asked.truncate or prompt.count)
        constraint = await self._serving.constraint_of(asked.constraint)
        adapter = self._serving.adapters.get(asked.adapter_id)
        virtual = 0 if adapter is None else adapter.virtual_tokens
        checks.check_length(asked, at, count, self._serving.limits, virtual)
        self._note_model(asked)
        request = self._request(asked, prompt.ids, constraint=constraint)
        request = with_adapter(request, adapter)
        images = await seen.encoded(prompt.ids)
        if images is not None:
            request = structs.replace(request, images=images)
        return request, RoutedSequence(asked, request, self._serving.tokenizer)

    def _refuse(self, asked: ShardRequest, problem: Exception) -> ShardGeneration:
        """End one request, whatever went wrong with it: the rpc is all the others', too."""
        if isinstance(problem, FieldError):
            extra = {"request": asked.id, "reason": str(problem)}
            log.warning("a router's request can't be served: it ends with no text", extra=extra)
        else:
            extra = {"request": asked.id, "error_id": Internal().error_id}
            log.error("internal error", exc_info=problem, extra=extra)
        return ended_alone(asked.id, self._serving.tokenizer)

    def _note_model(self, asked: ShardRequest) -> None:
        """Routers send the name of every model as an adapter; a shard without it takes the base."""
        name = asked.adapter_id
        if self._serving.adapters.get(name) is not None:
            return
        if name and name not in self._models and len(self._models) < _MOST_NAMES:
            self._models.add(name)
            log.info("no such adapter: served by the base model", extra={"adapter": name[:200]})

    def _request(
        self,
        asked: ShardRequest,
        prompt: list[int],
        *,
        probe: bool = False,
        constraint: Constraint | None = None,
    ) -> Request:
        eos = self._serving.tokenizer.eos_token_ids
        return Request(
            sequence_ids=self._serving.client.new_sequence_ids(1),
            prompt=prompt,
            sampling=shard_sampling_params(asked),
            stopping=StoppingParams(
                max_new_tokens=asked.max_new_tokens,
                eos_token_ids=frozenset() if asked.ignore_eos else eos,
                length_first=True,
            ),
            logprobs=True,
            top_n_tokens=asked.top_n_tokens,
            prompt_logprobs=asked.prefill_logprobs,
            arrived_at=time.monotonic_ns(),
            probe=probe,
            constraint=constraint,
            drafts=self._serving.limits.drafts if asked.several_tokens and not probe else 0,
        )
