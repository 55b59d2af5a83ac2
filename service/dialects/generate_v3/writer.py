"""The events of a `Generate` stream, as messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenpod.core.messages import FinishCode
from tokenpod.protos.generate.v3 import generate_pb2 as pb
from tokenpod.service.serving.calls import GenerateCall
from tokenpod.service.serving.deltas import Delta
from tokenpod.service.serving.generation import Generation, Sample
from tokenpod.service.text.tokenizer import Tokenizer

_FINISH = {
    FinishCode.LENGTH: pb.FINISH_LENGTH,
    FinishCode.EOS: pb.FINISH_EOS_TOKEN,
    FinishCode.STOP_TOKEN: pb.FINISH_STOP_SEQUENCE,
    FinishCode.TIME_LIMIT: pb.FINISH_TIME_LIMIT,
}


class EventWriter:
    """Turns what a generation brings into events, in the order the protocol promises.

    Args:
        call: what the client asked for.
        generation: where tokens arrive.
        tokenizer: names tokens.
    """

    def __init__(
        self,
        call: GenerateCall,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        model_id: str,
        request_id: str,
    ) -> None:
        self._call = call
        self._generation = generation
        self._tokenizer = tokenizer
        self._model_id = model_id
        self._request_id = request_id
        self._opened = False
        self._closed: set[int] = set()
        #: The sample that is asked first: a slow reader must not hear of one sample alone.
        self._turn = 0

    @property
    def done(self) -> bool:
        """Whether every event has been handed out."""
        return len(self._closed) == (self._call.sampling.n or 1)

    def next(self) -> pb.GenerateResponse | None:
        """The next thing to tell; None: nothing yet.

        One at a time, and made when it can be sent: what waits for a slow reader stays packed.
        """
        generation = self._generation
        if not self._opened and (generation.started or generation.finished):
            self._opened = True
            return pb.GenerateResponse(started=self._started())
        if self._call.output.stream:
            return self._next_of(generation.samples)
        if generation.finished:
            return self._next_of(generation.best(self._call.sampling.n or 1))
        return None

    def _next_of(self, samples: Sequence[Sample]) -> pb.GenerateResponse | None:
        """The next event of `samples`, those first that have waited longest."""
        count = len(samples)
        for offset in range(count):
            index = (self._turn + offset) % count
            if index in self._closed:
                continue
            sample = samples[index]
            if sample.has_news:
                self._turn = index + 1
                return self._delta(sample.take(), index)
            if sample.ending is not None:
                self._closed.add(index)
                return pb.GenerateResponse(finished=self._finished(sample, index))
        return None

    def _started(self) -> pb.Started:
        started, ids = self._generation.started, self._generation.request.prompt
        message = pb.Started(
            request_id=self._request_id,
            model_id=self._model_id,
            prompt_tokens=len(ids),
            cached_tokens=self._generation.cached_tokens,
        )
        if started is not None and self._call.output.prompt_logprobs:
            message.prompt.ids.extend(ids)
            message.prompt.logprobs.extend([math.nan, *(started.prompt_logprobs or [])])
            message.prompt.texts.extend(self._texts(ids))
        return message

    def _delta(self, delta: Delta, index: int) -> pb.GenerateResponse:
        special = self._tokenizer.special_ids
        # Written in place: a message is copied when it becomes part of another.
        response = pb.GenerateResponse()
        message = response.tokens
        message.index = index
        message.text = delta.text
        message.token_ids.extend(delta.token_ids)
        message.special.extend([token in special for token in delta.token_ids])
        if self._call.output.logprobs:
            message.logprobs.extend(delta.logprobs)
        if self._call.output.top_n_tokens:
            for ids, logprobs in delta.tops():
                message.top_tokens.add(ids=ids, logprobs=logprobs, texts=self._texts(ids))
        return response

    def _finished(self, sample: Sample, index: int) -> pb.Finished:
        generation, ending = self._generation, sample.ending
        assert ending is not None
        message = pb.Finished(
            index=index,
            text=sample.text,
            reason=_FINISH[ending.reason],
            cumulative_logprob=sample.cumulative_logprob,
            usage=pb.Usage(
                prompt_tokens=len(generation.request.prompt),
                cached_tokens=generation.cached_tokens,
                generated_tokens=sample.generated,
            ),
            timings=self._timings(sample),
        )
        if ending.stop_sequence is not None:
            message.stop_sequence = ending.stop_sequence
        elif ending.stop_token_id is not None:
            message.stop_token_id = ending.stop_token_id
        if generation.request.sampling.do_sample:
            message.seed = generation.request.sampling.seed
        return message

    def _timings(self, sample: Sample) -> pb.Timings:
        arrived, started = self._generation.request.arrived_at, self._generation.started
        if started is None or not sample.first_token_at:
            return pb.Timings()
        return pb.Timings(
            queue_ns=max(started.began_at - arrived, 0),
            prefill_ns=max(sample.first_token_at - started.began_at, 0),
            decode_ns=sample.last_token_at - sample.first_token_at,
            time_to_first_token_ns=max(sample.first_token_at - arrived, 0),
            total_ns=max(sample.last_token_at - arrived, 0),
        )

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.token_text(token) for token in ids]
