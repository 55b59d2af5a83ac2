"""What a generation brings, as messages of `fmaas`."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Sequence

from tokenpod.core.outputs import FinishCode
from tokenpod.service.calls.call import GenerateCall
from tokenpod.service.calls.generation import Generation
from tokenpod.service.calls.sample import Delta, Sample
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer
from tokenpod_client.protos.fmaas import generation_pb2 as pb

_STOP = {
    FinishCode.EOS: pb.EOS_TOKEN,
    FinishCode.STOP_TOKEN: pb.STOP_SEQUENCE,
    FinishCode.TIME_LIMIT: pb.TIME_LIMIT,
}
#: Stands for a token of which the client wants to read nothing.
_UNTOLD = pb.TokenInfo()
#: Tokens of a prompt that are named before others get their turn: some milliseconds.
_NAMES_AT_ONCE = 2048


class ResponseWriter:
    """The messages of a stream: one about the prompt, then one for each token.

    Args:
        call: what the client asked for.
        options: what of it the client wants to read.
        generation: where tokens arrive.
        tokenizer: names tokens.
    """

    def __init__(
        self,
        call: GenerateCall,
        options: pb.ResponseOptions,
        generation: Generation,
        tokenizer: Tokenizer,
    ) -> None:
        self.generation = generation
        self._call = call
        self._options = options
        self._name = tokenizer.backend.id_to_token
        self._opened = False
        self._ended = False
        #: What is reported of the prompt's tokens, once `prepare` has made it.
        self._prompt: list[pb.TokenInfo] = []
        #: Tokens that have come and were not told, each with where its text begins; and that text.
        self._tokens: deque[tuple[pb.TokenInfo, int]] = deque()
        self._text = ""
        #: Tokens and code points that were told.
        self._told = self._written = 0

    async def prepare(self) -> None:
        """Name the tokens of a prompt that is to be told; others get their turn meanwhile."""
        if not self._options.input_tokens:
            return
        options, started = self._options, self.generation.started
        # Nothing precedes the first.
        logprobs: Sequence[float] = ()
        if options.token_logprobs and started is not None:
            logprobs = [math.nan, *(started.prompt_logprobs or ())]
        details = started.prompt_details if started is not None else None
        ranks = [0, *details.rank_list()] if details is not None else []
        step = _NAMES_AT_ONCE // (options.top_n_tokens + 1)
        for at, token in enumerate(self.generation.request.prompt):
            if at % step == 0:
                await asyncio.sleep(0)
            info = pb.TokenInfo(text=self._name(token) or "")
            if logprobs:
                info.logprob = logprobs[at]
            if options.token_ranks and ranks:
                info.rank = ranks[at]
            if options.top_n_tokens and details is not None and at:
                self._tell_tops(info, *details.tops(at - 1))
            self._prompt.append(info)

    @property
    def done(self) -> bool:
        """Whether every message has been handed out."""
        return self._ended

    def next(self) -> pb.GenerationResponse | None:
        """The next message; None: nothing yet, or nothing more."""
        sample = self.generation.samples[0]
        if not self._opened and (self.generation.started or sample.ending):
            self._opened = True
            return self._opening()
        while sample.has_news:
            delta = sample.take()
            self._tokens.extend(zip(self._generated(delta), delta.offsets or (), strict=True))
            self._text += delta.text
        if self._ended or not (self._tokens or sample.ending):
            return None
        return self._one(sample)

    def whole(self) -> pb.GenerationResponse:
        """The answer as one message, once the generation has ended."""
        sample = self.generation.samples[0]
        response = self._opening()
        response.text += sample.text
        response.generated_token_count = sample.generated
        if self._options.generated_tokens:
            response.tokens.extend(self._generated(sample.take()))
        self._tell_end(response, sample)
        return response

    # -- parts ---------------------------------------------------------------------------------

    def _opening(self) -> pb.GenerationResponse:
        request, options = self.generation.request, self._options
        response = pb.GenerationResponse(input_token_count=len(request.prompt))
        if request.sampling.do_sample:
            response.seed = request.sampling.seed
        if options.input_text:
            assert isinstance(self._call.prompt, str)
            response.text = self._call.prompt
        if options.input_tokens:
            response.input_tokens.extend(self._prompt)
        return response

    def _generated(self, delta: Delta) -> Iterator[pb.TokenInfo]:
        options = self._options
        tops = delta.tops() if options.top_n_tokens else None
        ranks = delta.ranks() if options.token_ranks else None
        for at, token in enumerate(delta.token_ids):
            if not options.generated_tokens:
                yield _UNTOLD
                continue
            info = pb.TokenInfo(text=self._name(token) or "")
            if options.token_logprobs:
                info.logprob = delta.logprobs[at]
            if ranks is not None:
                info.rank = ranks[at]
            if tops is not None:
                self._tell_tops(info, *next(tops))
            yield info

    def _tell_tops(self, info: pb.TokenInfo, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        for each, logprob in zip(ids, logprobs, strict=True):
            top = info.top_tokens.add(text=self._name(each) or "")
            if self._options.token_logprobs:
                top.logprob = logprob

    def _one(self, sample: Sample) -> pb.GenerationResponse:
        """A message with one token; or with none, where the end comes without."""
        response = pb.GenerationResponse()
        if self._tokens:
            self._told += 1
            token, _ = self._tokens.popleft()
            if self._options.generated_tokens:
                response.tokens.append(token)
        response.generated_token_count = self._told
        response.text = self._text_before_next()
        if not self._tokens and sample.ending is not None:
            self._ended = True
            self._tell_end(response, sample)
        return response

    def _text_before_next(self) -> str:
        """What is to be told before the next token. It may lag behind the tokens told."""
        end = len(self._text)
        if self._tokens:
            end = max(self._tokens[0][1] - self._written, 0)
        text, self._text = self._text[:end], self._text[end:]
        self._written += len(text)
        return text

    def _tell_end(self, response: pb.GenerationResponse, sample: Sample) -> None:
        ending = sample.ending
        assert ending is not None
        if ending.reason is FinishCode.LENGTH:
            wanted = self._call.stopping.max_new_tokens or 0
            shortened = self.generation.request.stopping.max_new_tokens < wanted
            response.stop_reason = pb.TOKEN_LIMIT if shortened else pb.MAX_TOKENS
        elif ending.reason is FinishCode.CONSTRAINT:
            # It can't go on: the text is whole, or a limit was reached.
            response.stop_reason = pb.EOS_TOKEN if sample.satisfied else pb.ERROR
        else:
            response.stop_reason = _STOP[ending.reason]
        if ending.stop_sequence is not None:
            response.stop_sequence = ending.stop_sequence
