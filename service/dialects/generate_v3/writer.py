"""The events of a `Generate` stream, as messages."""

from __future__ import annotations

import math

from tokenpod.core.outputs import FinishCode
from tokenpod.service.calls.sample import Delta, Sample
from tokenpod.service.dialects.streams import SampleWriter
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

_FINISH = {
    FinishCode.LENGTH: pb.FINISH_LENGTH,
    FinishCode.EOS: pb.FINISH_EOS_TOKEN,
    FinishCode.STOP_TOKEN: pb.FINISH_STOP_SEQUENCE,
    FinishCode.TIME_LIMIT: pb.FINISH_TIME_LIMIT,
}


class EventWriter(SampleWriter):
    """Events of `Generate`."""

    def started(self) -> pb.GenerateResponse:
        """Request id, model, and what is known of the prompt."""
        started, ids = self.generation.started, self.generation.request.prompt
        message = pb.Started(
            request_id=self.request_id,
            model_id=self.model_id,
            prompt_tokens=len(ids),
            cached_tokens=self.generation.cached_tokens,
        )
        if started is not None and self.call.output.prompt_logprobs:
            message.prompt.ids.extend(ids)
            message.prompt.logprobs.extend([math.nan, *(started.prompt_logprobs or [])])
            message.prompt.texts.extend(self.texts(ids))
        return pb.GenerateResponse(started=message)

    def tokens(self, delta: Delta, index: int) -> pb.GenerateResponse:
        """Tokens with their text."""
        # Written in place: a message is copied when it becomes part of another.
        response = pb.GenerateResponse()
        message = response.tokens
        message.index = index
        message.text = delta.text
        message.token_ids.extend(delta.token_ids)
        message.special.extend(self.special(delta.token_ids))
        if self.call.output.logprobs:
            message.logprobs.extend(delta.logprobs)
        if self.call.output.top_n_tokens:
            for ids, logprobs in delta.tops():
                message.top_tokens.add(ids=ids, logprobs=logprobs, texts=self.texts(ids))
        return response

    def finished(self, sample: Sample, index: int) -> pb.GenerateResponse:
        """The whole text, and how it ended."""
        generation, ending = self.generation, sample.ending
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
        return pb.GenerateResponse(finished=message)

    def _timings(self, sample: Sample) -> pb.Timings:
        arrived, started = self.generation.request.arrived_at, self.generation.started
        if started is None or not sample.first_token_at:
            return pb.Timings()
        return pb.Timings(
            queue_ns=max(started.began_at - arrived, 0),
            prefill_ns=max(sample.first_token_at - started.began_at, 0),
            decode_ns=sample.last_token_at - sample.first_token_at,
            time_to_first_token_ns=max(sample.first_token_at - arrived, 0),
            total_ns=max(sample.last_token_at - arrived, 0),
        )
