"""What a generation brings, as messages of `tokenpod.v1`."""

from __future__ import annotations

import asyncio

from google.protobuf.duration_pb2 import Duration

from tokenpod.core.outputs import FinishCode
from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.calls.parts import Kind
from tokenpod.service.calls.sample import Delta, Sample
from tokenpod.service.dialects.streams import SampleWriter
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service_pb

_FINISH = {
    FinishCode.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishCode.EOS: pb.FINISH_REASON_EOS_TOKEN,
    FinishCode.STOP_TOKEN: pb.FINISH_REASON_STOP_SEQUENCE,
    FinishCode.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    FinishCode.CONSTRAINT: pb.FINISH_REASON_CONSTRAINT,
}
_NANOSECONDS = 1_000_000_000
#: Tokens of a prompt that are named before others get their turn: some milliseconds.
_NAMES_AT_ONCE = 2048
#: The role of what a model has written, which templates know by this name.
_ASSISTANT = "assistant"


class EventWriter(SampleWriter):
    """Events of `Generate`, and the answer of `GenerateOnce`."""

    #: The message about the prompt's tokens, once `prepare` has made it.
    _prompt: pb.PromptTokens | None = None

    async def prepare(self) -> None:
        """Name the tokens of a prompt whose scores were asked for; other tasks run meanwhile."""
        started, prompt = self.generation.started, self.generation.request.prompt
        output = self.call.output
        if started is None or not output.scores_prompt:
            return
        self._prompt = message = pb.PromptTokens(token_ids=prompt)
        if output.prompt_logprobs:
            message.logprobs.extend(started.prompt_logprobs or ())
        details, top_n = started.prompt_details, output.prompt_top_n_tokens
        if details is not None and output.prompt_ranks:
            message.ranks.extend(details.rank_list())
        step = max(_NAMES_AT_ONCE // (top_n + 1), 1)
        for first in range(0, len(prompt), step):
            await asyncio.sleep(0)
            message.texts.extend(self.texts(prompt[first : first + step]))
            if details is None or not top_n:
                continue
            for at in range(first, min(first + step, len(prompt) - 1)):
                ids, logprobs = details.tops(at)
                message.top_tokens.add(token_ids=ids, logprobs=logprobs, texts=self.texts(ids))

    def whole(self) -> service_pb.GenerateOnceResponse:
        """The answer, once every sample has ended."""
        response = service_pb.GenerateOnceResponse(usage=self._usage())
        self._tell_start(response.started)
        for index, sample in enumerate(self.generation.best(self.call.sampling.n or 1)):
            result = response.results.add()
            self._tell_end(result, sample, index)
            self._tell_tokens(result.tokens, sample.take(), index, text=False)
        return response

    def started(self) -> pb.GenerateResponse:
        """What is known of the prompt, and what the call will keep to."""
        response = pb.GenerateResponse()
        self._tell_start(response.started)
        return response

    def tokens(self, delta: Delta, index: int) -> pb.GenerateResponse:
        """Tokens with their text."""
        # Written in place: a message is copied when it becomes part of another.
        response = pb.GenerateResponse()
        self._tell_tokens(response.tokens, delta, index, text=True)
        return response

    def finished(self, sample: Sample, index: int) -> pb.GenerateResponse:
        """The whole text, and how it ended."""
        response = pb.GenerateResponse()
        self._tell_end(response.finished, sample, index)
        return response

    def completed(self) -> pb.GenerateResponse:
        """What the call took."""
        return pb.GenerateResponse(completed=pb.Completed(usage=self._usage()))

    # -- parts ---------------------------------------------------------------------------------

    def _tell_start(self, message: pb.Started) -> None:
        generation, request = self.generation, self.generation.request
        message.request_id = self.request_id
        message.model = self.model_id
        message.adapter = self.call.adapter
        message.prompt_token_count = len(request.prompt)
        message.cached_token_count = generation.cached_tokens
        message.max_new_tokens = request.stopping.max_new_tokens
        if request.sampling.do_sample:
            message.seed = request.sampling.seed
        if limit := self.call.stopping.time_limit_ns:
            message.time_limit.CopyFrom(_duration(limit))
        if self._prompt is not None:
            message.prompt_tokens.CopyFrom(self._prompt)

    def _tell_tokens(self, message: pb.Tokens, delta: Delta, index: int, *, text: bool) -> None:
        message.sample_index = index
        message.token_ids.extend(delta.token_ids)
        message.special.extend(self.special(delta.token_ids))
        if self.call.output.logprobs:
            message.logprobs.extend(delta.logprobs)
        if delta.offsets is not None:
            message.text_offsets.extend(delta.offsets)
        if self.call.output.ranks:
            message.ranks.extend(delta.ranks())
        if self.call.output.top_n_tokens:
            for ids, logprobs in delta.tops():
                message.top_tokens.add(token_ids=ids, logprobs=logprobs, texts=self.texts(ids))
        if text:
            _tell_text(message, delta)

    def _tell_end(self, message: pb.Finished, sample: Sample, index: int) -> None:
        ending, request = sample.ending, self.generation.request
        assert ending is not None
        message.sample_index = index
        message.finish_reason = _FINISH[ending.reason]
        if ending.reason is FinishCode.EOS and sample.calls_begun:
            message.finish_reason = pb.FINISH_REASON_TOOL_CALLS
        message.generated_token_count = sample.generated
        if self.call.output.final_text:
            self._tell_whole(message, sample)
        if request.logprobs:
            message.cumulative_logprob = sample.cumulative_logprob
        if request.beam is not None and sample.generated:
            message.score = sample.score(request.beam.length_penalty)
        if ending.stop_sequence is not None:
            message.stop_sequence = ending.stop_sequence
        elif ending.stop_token_id is not None:
            message.stop_token_id = ending.stop_token_id
        if sample.satisfied is not None:
            message.constraint_satisfied = sample.satisfied
        self._tell_timings(message, sample)

    def _tell_whole(self, message: pb.Finished, sample: Sample) -> None:
        """Text and reasoning and, where the prompt was a chat, the turn."""
        message.text = text = sample.text
        message.reasoning = sample.reasoning
        if not isinstance(self.call.prompt, ChatPrompt):
            return
        answer = message.message
        answer.role = _ASSISTANT
        answer.reasoning = message.reasoning
        for call in sample.calls:
            answer.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
        if text or not answer.tool_calls:
            answer.content.add(text=text)

    def _tell_timings(self, message: pb.Finished, sample: Sample) -> None:
        arrived, started = self.generation.request.arrived_at, self.generation.started
        if started is None or not sample.first_token_at:
            return
        timings = message.timings
        timings.queue_duration.CopyFrom(_duration(max(started.began_at - arrived, 0)))
        timings.prefill_duration.CopyFrom(
            _duration(max(sample.first_token_at - started.began_at, 0))
        )
        timings.decode_duration.CopyFrom(_duration(sample.last_token_at - sample.first_token_at))

    def _usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_token_count=len(self.generation.request.prompt),
            cached_token_count=self.generation.cached_tokens,
            generated_token_count=self.generation.generated_tokens,
            reasoning_token_count=self.generation.reasoning_tokens,
            drafted_token_count=self.generation.drafted_tokens,
            accepted_token_count=self.generation.accepted_tokens,
        )


def _tell_text(message: pb.Tokens, delta: Delta) -> None:
    """What became readable, as what it is."""
    text, part = delta.text, delta.part
    if part is not None and part.kind is Kind.CALL:
        call = message.tool_call
        call.call_index, call.id, call.name = part.call, part.call_id, part.name
        call.arguments = text
    elif part is not None and text:
        message.reasoning = text
    elif text:
        message.text = text


def _duration(nanoseconds: int) -> Duration:
    seconds, nanos = divmod(nanoseconds, _NANOSECONDS)
    return Duration(seconds=seconds, nanos=nanos)
