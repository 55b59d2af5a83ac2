"""Choosing tokens: every row of a batch by its own parameters.

The processors run in the order that `SamplingParams` documents, and a neutral one is not run at
all, so it changes no bit. A greedy row without penalties costs an argmax. A row that truncates its
distribution (top_k, top_p, min_p, typical_p) is reduced to its surviving tokens before anything is
drawn; noise depends on the token's id, so the draw is the same as over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tokenpod.engine.processors import (
    Candidates,
    History,
    penalise,
    truncate,
    watermark_bias,
)
from tokenpod.engine.rng import signed, token_noise, vocabulary_noise
from tokenpod.engine.types import SamplingParams

#: Ties at the n-th place are all reported, up to so many tokens in all.
MOST_TOP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Samples:
    """What was drawn, row by row."""

    #: [n] int64; -1 where the logits held NaN, +Inf or nothing but -Inf.
    tokens: torch.Tensor
    #: [n] float32: log probability among the processed scores; 0 where no row asked.
    logprobs: torch.Tensor
    #: (index, ids, log probabilities of the raw logits): falling, the lowest id first in ties.
    tops: list[tuple[int, list[int], list[float]]] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    params: SamplingParams
    stream: int
    history: History
    min_new_tokens: int
    #: Tokens that may not be drawn before `min_new_tokens`.
    ends: torch.Tensor
    logprobs: bool
    top_n: int

    @property
    def plain(self) -> bool:
        """Greedy, with untouched scores."""
        return not (self.params.do_sample or self.penalised or self.min_new_tokens)

    @property
    def penalised(self) -> bool:
        params = self.params
        return bool(
            params.watermark
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.relative_frequency_penalty
            or params.logit_bias
        )

    @property
    def truncates(self) -> bool:
        params = self.params
        return bool(params.top_k or params.top_p < 1.0 or params.min_p or params.typical_p < 1.0)


class Sampler:
    """The rows' parameters and histories, on the device.

    Args:
        rows: how many sequences can be live at once.
        vocab_size: width of the logits.
        device: where logits come from.
    """

    def __init__(self, *, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: list[_Row | None] = [None] * rows

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        stream: int,
        prompt: Sequence[int],
        eos_token_ids: frozenset[int],
        stop_token_ids: frozenset[int],
        min_new_tokens: int,
        logprobs: bool,
        top_n: int,
        outputs: Sequence[int] = (),
    ) -> None:
        """Give a row to a sequence. `outputs`: what it has sampled already, when it resumes."""
        ends = sorted(eos_token_ids | stop_token_ids)
        self._rows[row] = _Row(
            params=params,
            stream=stream,
            history=History(params, prompt, outputs, self._vocab_size, self._device),
            min_new_tokens=min_new_tokens if ends else 0,
            ends=torch.tensor(ends, dtype=torch.int64, device=self._device),
            logprobs=logprobs,
            top_n=top_n,
        )

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        self._rows[row] = None

    def sample(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> Samples:
        """Draw one token a row.

        Args:
            logits: [n, vocab_size] float32; not changed.
            rows: n rows.
            positions: n; which output token of its sequence is drawn, from 0.
        """
        states = [self._state(row) for row in rows]
        tokens = argmax(logits)
        peaks = logits.gather(1, tokens[:, None]).squeeze(1)
        logprobs = torch.zeros(len(rows), dtype=torch.float32, device=self._device)
        plain = [i for i, state in enumerate(states) if state.plain and state.logprobs]
        if plain:
            whole = len(plain) == len(rows)
            scores = logits if whole else logits[plain]
            values = peaks if whole else peaks[plain]
            logprobs[plain] = values - scores.logsumexp(1)
        bad = ~torch.isfinite(peaks)
        spoiled = set(bad.nonzero().flatten().tolist())
        full: list[int] = []
        for i, state in enumerate(states):
            if state.plain or i in spoiled:
                continue
            if state.params.do_sample and not state.truncates:
                full.append(i)
                continue
            scores = self._processed(logits[i], state, positions[i])
            tokens[i], logprobs[i] = self._draw_one(scores, state, positions[i])
        if full:
            self._draw_full(logits, states, positions, full, tokens, logprobs)
        tokens.masked_fill_(bad, -1)
        tops = self._tops(logits, states, spoiled)
        for i, state in enumerate(states):
            state.history.note(tokens[i])
        return Samples(tokens, logprobs.masked_fill(bad, 0.0), tops)

    # -- parts ---------------------------------------------------------------------------------

    def _state(self, row: int) -> _Row:
        state = self._rows[row]
        assert state is not None, f"row {row} belongs to nobody"
        return state

    def _processed(self, raw: torch.Tensor, state: _Row, position: int) -> torch.Tensor:
        """[vocab] scores after everything that comes before temperature."""
        params, history = state.params, state.history
        scores = raw
        if state.penalised:
            scores = raw.clone()
            if params.watermark:
                scores += watermark_bias(history.previous, self._vocab_size, self._device)
            penalise(scores, params, history)
        if position < state.min_new_tokens:
            scores = scores.index_fill(0, state.ends, -torch.inf)
        return scores

    def _draw_one(
        self, scores: torch.Tensor, state: _Row, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token and its log probability."""
        params = state.params
        if not params.do_sample:
            token = argmax(scores[None])[0]
            return token, scores[token] - scores.logsumexp(0) if state.logprobs else scores[0] * 0
        if params.temperature != 1.0:
            scores = scores / params.temperature
        kept = truncate(scores, params)
        logprobs = kept.scores - kept.scores.logsumexp(0)
        seed, stream, where = self._counters([state], [position])
        noise = token_noise(seed, stream, where, kept.ids)
        # argmax of log p - log E: the order of p / E without underflow.
        at = argmax((logprobs - noise.log())[None])[0]
        return kept.ids[at], logprobs[at]

    def _draw_full(
        self,
        logits: torch.Tensor,
        states: list[_Row],
        positions: list[int],
        which: list[int],
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        """Rows that draw from the whole vocabulary, together."""
        chosen = [states[i] for i in which]
        rows = [self._processed(logits[i], states[i], positions[i]) for i in which]
        temperature = torch.tensor([s.params.temperature for s in chosen], device=self._device)
        scores = torch.log_softmax(torch.stack(rows) / temperature[:, None], dim=1)
        counters = self._counters(chosen, [positions[i] for i in which])
        noise = vocabulary_noise(*counters, self._vocab_size)
        drawn = argmax(scores - noise.log())
        tokens[which] = drawn
        logprobs[which] = scores.gather(1, drawn[:, None]).squeeze(1)

    def _counters(
        self, states: list[_Row], positions: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n] each: seeds, streams, positions."""
        numbers = torch.tensor(
            [
                [signed(state.params.seed), state.stream, position]
                for state, position in zip(states, positions, strict=True)
            ],
            dtype=torch.int64,
            device=self._device,
        )
        return numbers[:, 0], numbers[:, 1], numbers[:, 2]

    def _tops(
        self, logits: torch.Tensor, states: list[_Row], spoiled: set[int]
    ) -> list[tuple[int, list[int], list[float]]]:
        tops = []
        for i, state in enumerate(states):
            if state.top_n and i not in spoiled:
                best = top_tokens(logits[i], min(state.top_n, self._vocab_size))
                values = best.scores - logits[i].logsumexp(0)
                tops.append((i, best.ids.tolist(), values.tolist()))
        return tops


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """[n] int64: the highest score of each row, the lowest id in ties; a NaN counts as highest."""
    if scores.device.type == "cpu":
        # numpy's is more than ten times faster than torch's on a CPU.
        return torch.from_numpy(scores.numpy().argmax(axis=1))
    return scores.argmax(dim=1)


def top_tokens(scores: torch.Tensor, n: int) -> Candidates:
    """The n highest scores and all that tie with the last, at most MOST_TOP_TOKENS, in order."""
    least = scores.topk(n).values[-1]
    ids = (scores >= least).nonzero().flatten()
    values, order = scores[ids].sort(descending=True, stable=True)
    return Candidates(ids[order][:MOST_TOP_TOKENS], values[:MOST_TOP_TOKENS])


def prompt_logprobs(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
    """[n] float32: log probability of each prompt token after the one before it, of raw logits.

    Args:
        logits: [n, vocab] float32.
        next_tokens: [n] int64.
    """
    return logits.gather(1, next_tokens[:, None]).squeeze(1) - logits.logsumexp(1)
