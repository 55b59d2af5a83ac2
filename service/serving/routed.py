"""Sequences of a router's batch: their texts by TGI's rules, and the tokens of a step."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable

from tokenpod.core.outputs import Drafted, Failure, FailureCode, FinishCode, Started, Top, Vectors
from tokenpod.core.requests import Request
from tokenpod.service.calls.call import ShardGeneration, ShardRequest, ShardText, TokenList
from tokenpod.service.calls.errors import Internal, ServiceError, engine_failure
from tokenpod.service.text.reader import TailStops
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("tokenpod.shard")

#: TGI's FinishReason.
_LENGTH, _EOS_TOKEN, _STOP_SEQUENCE = 0, 1, 2


class RoutedSequence:
    """One request of a router's batch.

    Args:
        asked: the router's request.
        request: the engine's.
        tokenizer: the model's.
    """

    def __init__(self, asked: ShardRequest, request: Request, tokenizer: Tokenizer) -> None:
        self.request_id = asked.id
        self.sequence_id = request.sequence_ids[0]
        #: Tokens of KV cache that this sequence may come to need, as routers count them: the last
        #: token's keys and values are never written.
        self.bound = request.positions + request.stopping.max_new_tokens - 1
        #: Prompt tokens that its first step processes; 0: all.
        self.chunk = asked.chunk_len or 0
        self.stopped = False
        #: Stopped by a stop sequence, which the engine cannot see.
        self.stopped_by_text = False
        #: It waits for a row, or for a step that has room for its prompt.
        self.waits = True
        #: Prompt tokens that have yet to be processed, virtual ones of its adapter among them.
        self.behind = request.positions
        self._request = request
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(request.prompt)
        self._stops = TailStops(asked.stop_sequences)
        self._generated = 0
        self._texts: list[str] = []

    @property
    def next_tokens(self) -> int:
        """Tokens that the next step processes: one, or what is left of the prompt."""
        return max(self.behind, 1)

    def push(
        self,
        token_id: int,
        logprob: float,
        finish: FinishCode,
        top: Top | None,
        answer: ShardGeneration,
    ) -> None:
        """Take one of this step's tokens, and add it to what the answer to the router says."""
        special = token_id in self._tokenizer.special_ids
        if special:
            text = self._tokenizer.token_text(token_id)
        else:
            text = self._detokenizer.push(token_id)
            self._texts.append(text)
        reason = self._finish_reason(finish, text)
        self._generated += 1
        tokens = answer.tokens
        tokens.ids.append(token_id)
        tokens.logprobs.append(logprob)
        tokens.texts.append(text)
        tokens.special.append(special)
        if top is not None:
            answer.tops.append(self._named(top.token_ids, top.logprobs))
        if reason is not None:
            answer.text = self._final_text(reason)

    def begun(self, started: Started | None) -> ShardGeneration:
        """What the answer to the router says, before the first of the step's tokens.

        `started`: the prompt has been computed in this step.
        """
        prefill = None if started is None else self._prompt_tokens(started)
        return ShardGeneration(self.request_id, prefill=prefill)

    def end_without_token(self) -> ShardGeneration:
        """End with the text so far: a constraint allows nothing more."""
        self.stopped = True
        self._generated += 1
        end = min(self._tokenizer.eos_token_ids, default=0)
        return ShardGeneration(
            request_id=self.request_id,
            tokens=TokenList([end], [0.0], [""], [True]),
            text=self._final_text(_EOS_TOKEN),
        )

    def give_up(self) -> ShardGeneration:
        """End the sequence after a failure of its own; returns what the answer says of it."""
        self.stopped = True
        return ended_alone(
            self.request_id,
            self._tokenizer,
            generated=self._generated + 1,
            prompt_tokens=len(self._request.prompt),
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
        return TokenList(ids, logprobs, texts, [t in self._tokenizer.special_ids for t in ids])


class StepSink:
    """Gathers one step's tokens for the sequences of a batch."""

    def __init__(self, sequences: Iterable[RoutedSequence]) -> None:
        #: By sequence id.
        self._generations: dict[int, ShardGeneration] = {}
        #: The engine is lost.
        self.failure: ServiceError | None = None
        self._by_id = {sequence.sequence_id: sequence for sequence in sequences}
        self._started: dict[int, Started] = {}
        self._news = asyncio.Event()

    @property
    def generations(self) -> list[ShardGeneration]:
        """What the answer to the router says of the sequences that have got a token, or ended."""
        return [*self._generations.values()]

    async def over(self) -> None:
        """Wait until every sequence has stopped, or the engine is lost."""
        while self.failure is None and not all(s.stopped for s in self._by_id.values()):
            self._news.clear()
            await self._news.wait()

    def on_started(self, started: Started) -> None:
        """A prompt is complete."""
        self._started[started.sequence_id] = started

    def on_token(
        self, sequence_id: int, token_id: int, logprob: float, finish: FinishCode, top: Top | None
    ) -> None:
        """The token of a sequence in this step, the next one of several, or its end without one."""
        sequence = self._by_id[sequence_id]
        if sequence.stopped:  # by a token before it, which the engine can't see
            return
        if token_id < 0:
            self._generations[sequence_id] = sequence.end_without_token()
            return
        answer = self._generations.get(sequence_id)
        if answer is None:
            answer = sequence.begun(self._started.get(sequence_id))
            self._generations[sequence_id] = answer
        sequence.push(token_id, logprob, finish, top, answer)

    def on_vectors(self, vectors: Vectors) -> None:
        """A router asks for none."""

    def on_drafted(self, drafted: Drafted) -> None:
        """Routers are not told."""

    def on_satisfied(self, sequence_id: int, *, whole: bool) -> None:
        """The protocol has no word for it."""

    def on_failure(self, failure: Failure) -> None:
        """A sequence that fails ends alone; without an engine the rpc fails."""
        if failure.code is FailureCode.UNAVAILABLE:
            self.failure = engine_failure(failure)
            return
        self._give_up(failure.sequence_id, reason=failure.message)

    def on_fault(self, sequence_id: int, fault: Internal) -> None:
        """The code that reads a sequence's text has raised: it ends alone, with no text."""
        self._give_up(sequence_id, error_id=fault.error_id)
        self._news.set()

    def wake(self) -> None:
        """All of a message has been handed over."""
        self._news.set()

    def _give_up(self, sequence_id: int, **why: str) -> None:
        sequence = self._by_id[sequence_id]
        extra = {"request": sequence.request_id, **why}
        log.warning("a router's request has failed: it ends with no text", extra=extra)
        self._generations[sequence_id] = sequence.give_up()


def ended_alone(
    request_id: int, tokenizer: Tokenizer, *, generated: int = 1, prompt_tokens: int = 0
) -> ShardGeneration:
    """How a request ends that can't be served, while the rest of its batch goes on.

    The protocol knows no failure of one request, and an error would end all that its router has
    under way. LENGTH would make the router send the request again; no token at all would stop it.
    """
    end = min(tokenizer.eos_token_ids, default=0)
    return ShardGeneration(
        request_id=request_id,
        tokens=TokenList([end], [0.0], [""], [True]),
        text=ShardText(
            text="",
            generated_tokens=generated,
            finish_reason=_EOS_TOKEN,
            seed=None,
            prompt_tokens=prompt_tokens,
        ),
    )
