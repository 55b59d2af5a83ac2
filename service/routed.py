"""A sequence that a router holds: its text by TGI's rules, and how far its prompt has come."""

from __future__ import annotations

import math

from tokenpod.engine.types import FinishCode, Request, Started, Top
from tokenpod.service.calls import ShardGeneration, ShardRequest, ShardText, TokenList
from tokenpod.service.stops import TailStops
from tokenpod.service.tokenizer import Tokenizer

#: TGI's FinishReason.
_LENGTH, _EOS_TOKEN, _STOP_SEQUENCE = 0, 1, 2


class HeldSequence:
    """One request of a router's batch.

    Args:
        asked: the router's request.
        request: the engine's.
        tokenizer: the model's.
    """

    def __init__(self, asked: ShardRequest, request: Request, tokenizer: Tokenizer) -> None:
        self.request_id = asked.id
        self.sequence_id = request.sequence_ids[0]
        #: Tokens this sequence may grow to, prompt included.
        self.bound = len(request.prompt) + request.stopping.max_new_tokens
        self.stopped = False
        #: Stopped by a stop sequence, which the engine cannot see.
        self.stopped_by_text = False
        self._chunk_len = asked.chunk_len
        self._request = request
        self._tokenizer = tokenizer
        self._prompt_done = 0
        self._detokenizer = tokenizer.detokenizer(request.prompt)
        self._stops = TailStops(asked.stop_sequences)
        self._generated = 0
        self._texts: list[str] = []

    @property
    def next_tokens(self) -> int:
        """Tokens that the next step processes: one, or what is left of the prompt."""
        return max(len(self._request.prompt) - self._prompt_done, 1)

    def begin(self) -> int:
        """The position up to which the first step processes the prompt; 0: to its end."""
        return self._process(self._chunk_len or len(self._request.prompt))

    def resume(self, most: int) -> int:
        """The same for a later step, which takes up to `most` prompt tokens."""
        return self._process(most)

    def _process(self, tokens: int) -> int:
        length = len(self._request.prompt)
        self._prompt_done = min(self._prompt_done + tokens, length)
        return self._prompt_done if self._prompt_done < length else 0

    def push(
        self,
        token_id: int,
        logprob: float,
        finish: FinishCode,
        top: Top | None,
        started: Started | None,
    ) -> ShardGeneration:
        """Take this step's token; what the router is told."""
        self._generated += 1
        special = self._tokenizer.is_special(token_id)
        if special:
            text = self._tokenizer.token_text(token_id)
        else:
            text = self._detokenizer.push(token_id)
            self._texts.append(text)
        reason = self._finish_reason(finish, text)
        token = TokenList([token_id], [logprob], [text], [special])
        return ShardGeneration(
            request_id=self.request_id,
            token=token,
            prefill=self._prompt_tokens(started) if started else None,
            top=self._named(top.token_ids, top.logprobs) if top else None,
            text=None if reason is None else self._final_text(reason),
        )

    def _finish_reason(self, finish: FinishCode, text: str) -> int | None:
        """TGI's order: LENGTH, then EOS, then the stop sequences."""
        if finish is FinishCode.LENGTH:
            reason = _LENGTH
        elif finish is FinishCode.EOS:
            reason = _EOS_TOKEN
        elif self._stops.push(text) is not None:
            reason = _STOP_SEQUENCE
            self.stopped_by_text = True
        else:
            return None
        self.stopped = True
        return reason

    def _final_text(self, reason: int) -> ShardText:
        sampling = self._request.sampling
        return ShardText(
            text="".join(self._texts) + self._detokenizer.finish(),
            generated_tokens=self._generated,
            finish_reason=reason,
            seed=sampling.seed if sampling.do_sample else None,
            prompt_tokens=len(self._request.prompt),
        )

    def _prompt_tokens(self, started: Started) -> TokenList | None:
        if not self._request.prompt_logprobs:
            return None
        logprobs = [math.nan, *(started.prompt_logprobs or [])]
        return self._named(self._request.prompt, logprobs)

    def _named(self, ids: list[int], logprobs: list[float]) -> TokenList:
        texts = [self._tokenizer.token_text(token) for token in ids]
        return TokenList(ids, logprobs, texts, [self._tokenizer.is_special(t) for t in ids])
