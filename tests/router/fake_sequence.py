"""A request inside the fake shard: its prompt, its tokens, and TGI's rules of where it stops."""

from __future__ import annotations

import re
from typing import Any

from router import fake_model as model
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

#: TGI matches stop sequences in the last 200 characters once a text exceeds 300.
STOP_WINDOW, STOP_LIMIT = 200, 300


class Sequence:
    """One request in a batch: its texts joined, its images skipped, its adapter's name ignored."""

    def __init__(self, request: Any) -> None:
        chunks = request.input_chunks.chunks
        text = "".join(chunk.text for chunk in chunks) if chunks else request.inputs
        prompt = model.encode(text, special=request.add_special_tokens) if text else []
        self.request = request
        #: Whose turn it is, by the shard's rows; see `Rows`.
        self.has_row = False
        self.prompt = prompt[-request.truncate :] if request.truncate else prompt
        self.done = 0
        self.output: list[int] = []
        self.stopped = False
        self._matched = ""
        self._context = model.digest(self.prompt)

    @property
    def next_chunk(self) -> int:
        """Prompt tokens of its next step: a router may send the first piece of a prompt only."""
        whole = self.done > 0 or not self.request.HasField("chunk_len")
        return self.next_tokens if whole else int(self.request.chunk_len)

    @property
    def bound(self) -> int:
        """Tokens that it may come to hold: the last one needs no room."""
        return len(self.prompt) + self.request.stopping_parameters.max_new_tokens - 1

    @property
    def next_tokens(self) -> int:
        """Tokens that its next forward processes."""
        return 0 if self.stopped else max(1, len(self.prompt) - self.done)

    def unservable(self, max_total_tokens: int) -> bool:
        """Whether it asks for what this shard can't do, so that it ends alone."""
        new = int(self.request.stopping_parameters.max_new_tokens)
        return (
            "(?=" in self.request.parameters.grammar
            or not self.prompt
            or new == 0
            or len(self.prompt) + new > max_total_tokens
        )

    def ended_alone(self) -> Any:
        """The only generation of a request that can't be served: a router sends LENGTH again."""
        generation = pb.Generation(
            request_id=self.request.id, tokens=_run([model.EOS], [0.0], flags=True)
        )
        generation.generated_text.generated_tokens = 1
        generation.generated_text.finish_reason = pb.FINISH_REASON_EOS_TOKEN
        return generation

    def advance(self, chunk: int) -> Any | None:
        """Process up to `chunk` prompt tokens; the generation that follows a complete prompt."""
        if self.done < len(self.prompt):
            self.done = min(len(self.prompt), self.done + chunk)
            if self.done < len(self.prompt):
                return None
        return self._generate()

    def _generate(self) -> Any:
        params, request = self.request.parameters, self.request
        temperature = params.temperature or 1.0
        sampled = params.do_sample or temperature != 1.0 or params.top_k != 0
        sampled = sampled or 0 < params.top_p < 1 or 0 < params.typical_p < 1
        scores = model.logits(self._context)
        index = model.choose(
            scores, temperature, params.seed if sampled else None, len(self.output)
        )
        token = model.CANDIDATES[index]
        generation = pb.Generation(
            request_id=request.id,
            tokens=_run([token], [model.logprob(scores, index, temperature)], flags=True),
        )
        if request.top_n_tokens:
            raw = model.logprobs(scores)
            best = model.top(raw, request.top_n_tokens)
            generation.top_tokens.append(
                _run([model.CANDIDATES[i] for i in best], [raw[i] for i in best], flags=True)
            )
        if request.prefill_logprobs and not self.output:
            generation.prefill_tokens.CopyFrom(_run(self.prompt, self._prompt_logprobs()))
        self.output.append(token)
        self._context = model.digest([token], self._context)
        reason = self._finish_reason(token)
        if reason is not None:
            self.stopped = True
            generation.generated_text.text = "".join(map(model.piece, self.output))
            generation.generated_text.generated_tokens = len(self.output)
            generation.generated_text.finish_reason = reason
            if sampled:
                generation.generated_text.seed = params.seed
        return generation

    def _prompt_logprobs(self) -> list[float]:
        values, context = [float("nan")], 0
        for last, token in zip(self.prompt, self.prompt[1:], strict=False):
            context = model.digest([last], context)
            known = token in model.CANDIDATES
            values.append(
                model.logprob(model.logits(context), model.CANDIDATES.index(token))
                if known
                else -20.0
            )
        return values

    def _finish_reason(self, token: int) -> int | None:
        stopping = self.request.stopping_parameters
        if len(self.output) >= stopping.max_new_tokens:
            return int(pb.FINISH_REASON_LENGTH)
        if token == model.EOS and not stopping.ignore_eos_token:
            return int(pb.FINISH_REASON_EOS_TOKEN)
        self._matched += model.piece(token)
        if len(self._matched) > STOP_LIMIT:
            self._matched = self._matched[-STOP_WINDOW:]
        if any(re.search(re.escape(s) + "$", self._matched) for s in stopping.stop_sequences):
            return int(pb.FINISH_REASON_STOP_SEQUENCE)
        return None


def _run(ids: list[int], logprobs: list[float], *, flags: bool = False) -> Any:
    return pb.Tokens(
        ids=ids,
        logprobs=logprobs,
        texts=[model.piece(token) for token in ids],
        is_special=[token in model.SPECIAL for token in ids] if flags else None,
    )
