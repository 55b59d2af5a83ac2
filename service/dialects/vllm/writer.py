"""What a generation brings, as messages of `vllm.grpc.engine`."""

from __future__ import annotations

from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from tokenpod.core.outputs import FinishCode
from tokenpod.service.calls.sample import Delta, Sample
from tokenpod.service.dialects.streams import SampleWriter

_FINISH = {
    FinishCode.LENGTH: "length",
    FinishCode.EOS: "stop",
    FinishCode.STOP_TOKEN: "stop",
    FinishCode.ABORTED: "abort",
    # Without its end, as where it is cut off.
    FinishCode.CONSTRAINT: "length",
}


class EngineWriter(SampleWriter):
    """Chunks, with the tokens since the last one; then a `complete` for each sample.

    Without a stream a `complete` has all tokens of its sample, and there are no chunks.
    """

    def next(self) -> Any:
        """The next message; None: nothing yet, or nothing more."""
        if self.call.output.stream:
            return super().next()
        return self._next_complete() if self.generation.finished else None

    def started(self) -> None:
        """The first chunk tells of the prompt."""

    def tokens(self, delta: Delta, index: int) -> pb.GenerateResponse:
        """Tokens, and how many these are."""
        response = pb.GenerateResponse()
        chunk = response.chunk
        self._tell_prompt(chunk)
        chunk.token_ids.extend(delta.token_ids)
        chunk.completion_tokens = len(delta.token_ids)
        chunk.index = index
        if self.call.output.logprobs:
            self._tell_logprobs(chunk.output_logprobs, delta)
        return response

    def finished(self, sample: Sample, index: int) -> pb.GenerateResponse:
        """How a sample ended, after its chunks."""
        return self._complete(sample, index, Delta())

    # -- parts ---------------------------------------------------------------------------------

    def _next_complete(self) -> pb.GenerateResponse | None:
        for index, sample in enumerate(self.generation.samples):
            if index not in self._closed:
                self._closed.add(index)
                return self._complete(sample, index, sample.take())
        self._completed = True
        return None

    def _complete(self, sample: Sample, index: int, delta: Delta) -> pb.GenerateResponse:
        response, ending = pb.GenerateResponse(), sample.ending
        assert ending is not None
        complete = response.complete
        self._tell_prompt(complete)
        complete.output_ids.extend(delta.token_ids)
        complete.completion_tokens = sample.generated
        complete.finish_reason = _FINISH[ending.reason]
        if ending.reason is FinishCode.CONSTRAINT and sample.satisfied:
            complete.finish_reason = "stop"
        complete.index = index
        if ending.stop_sequence is not None:
            complete.matched_stop_str = ending.stop_sequence
        elif ending.stop_token_id is not None:
            complete.matched_token_id = ending.stop_token_id
        if self.call.output.logprobs and delta.token_ids:
            self._tell_logprobs(complete.output_logprobs, delta)
        return response

    def _tell_prompt(self, message: Any) -> None:
        """Of a chunk or a `complete`: what is known of the prompt."""
        prompt = self.generation.request.prompt
        message.prompt_tokens = len(prompt)
        message.cached_tokens = self.generation.cached_tokens
        started = self.generation.started
        if self._opened_prompt or started is None or not self.call.output.prompt_logprobs:
            return
        self._opened_prompt = True
        known = message.input_logprobs
        known.token_ids.extend(prompt)
        # Nothing precedes the first.
        known.token_logprobs.add()
        for logprob in started.prompt_logprobs or ():
            known.token_logprobs.add(value=logprob)
        details = started.prompt_details
        if details is not None and details.top_n:
            known.top_logprobs.add()
            for at in range(len(prompt) - 1):
                ids, logprobs = details.tops(at)
                known.top_logprobs.add(values=logprobs, token_ids=ids)

    #: Whether the log probabilities of the prompt were told.
    _opened_prompt = False

    def _tell_logprobs(self, message: pb.OutputLogProbs, delta: Delta) -> None:
        message.token_logprobs.extend(delta.logprobs)
        message.token_ids.extend(delta.token_ids)
        if self.call.output.top_n_tokens:
            for ids, logprobs in delta.tops():
                message.top_logprobs.add(values=logprobs, token_ids=ids)
