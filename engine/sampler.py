"""Choosing tokens: every row of a batch by its own parameters.

The processors run in the order that `SamplingParams` documents, and a neutral one is not run at
all, so it changes no bit. A greedy row without penalties costs an argmax. A row that truncates its
distribution (top_k, top_p, min_p, typical_p) is reduced to its surviving tokens before anything is
drawn; noise depends on the token's id, so the draw is the same as over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tokenpod.core.messages import SamplingParams
from tokenpod.engine.processors import (
    History,
    log_mass,
    penalise,
    truncate,
    watermark_bias,
)
from tokenpod.engine.rng import signed, token_noise, vocabulary_noise
from tokenpod.engine.row_sampling import RowSampling

#: Ties at the n-th place are all reported, up to so many tokens in all.
MOST_TOP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Samples:
    """What was drawn, row by row."""

    #: [n] int64; -1 where the logits held NaN, +Inf or nothing but -Inf.
    tokens: torch.Tensor
    #: [n] float32: log probability among the processed scores; 0 where no row asked.
    logprobs: torch.Tensor
    #: (index, ids, log probabilities): falling, the lowest id first in ties. Of the raw logits, or
    #: of what was drawn from where the row asks for that.
    tops: list[tuple[int, list[int], list[float]]] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    asks: RowSampling
    history: History
    #: `asks.ends` on the device.
    ends: torch.Tensor

    @property
    def params(self) -> SamplingParams:
        return self.asks.params


@dataclass(frozen=True, slots=True)
class _Distributions:
    """What m rows' tokens are drawn from."""

    #: [m, k] scores, -inf where a token can't be drawn.
    scores: torch.Tensor
    #: [m, k] which tokens' scores they are; None: the whole vocabulary's.
    ids: torch.Tensor | None = None

    def tops(self, at: int, n: int) -> tuple[list[int], list[float]]:
        """Ids and log probabilities of a row's n most likely tokens and of all that tie.

        They are computed as the drawn token's log probability is, so that its own is the same.
        """
        scores = self.scores[at : at + 1]
        best = top_tokens(scores[0], min(n, scores.shape[1]))
        best = best[scores[0, best] > -torch.inf]
        if self.ids is None:
            return best.tolist(), scores.log_softmax(1)[0, best].tolist()
        values = (scores - log_mass(scores)).to(torch.float32)
        return self.ids[at, best].tolist(), values[0, best].tolist()


#: Scores, rows and positions to tokens, log probabilities, and what they are drawn from.
_Draw = Callable[
    [torch.Tensor, list[_Row], list[int]],
    tuple[torch.Tensor, torch.Tensor, _Distributions],
]


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
        self, row: int, asks: RowSampling, prompt: Sequence[int], outputs: Sequence[int] = ()
    ) -> None:
        """Give a row to a sequence. `outputs`: what it has sampled already, when it resumes."""
        self._rows[row] = _Row(
            asks=asks,
            history=History(asks.params, prompt, outputs, self._vocab_size, self._device),
            ends=torch.tensor(asks.ends, dtype=torch.int64, device=self._device),
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
        bad = ~torch.isfinite(logits.gather(1, tokens[:, None]).squeeze(1))
        logprobs = torch.zeros(len(rows), dtype=torch.float32, device=self._device)
        plain = [i for i, state in enumerate(states) if state.asks.plain and state.asks.logprobs]
        if plain:
            logprobs[plain] = logprobs_of(_rows(logits, plain), _rows(tokens, plain))
        # What rows were drawn from whose top tokens are of that, and where in it they are.
        sources: dict[int, tuple[_Distributions, int]] = {}
        for draw, which in self._groups(states):
            chosen, where = [states[i] for i in which], [positions[i] for i in which]
            scores = self._processed(_rows(logits, which), chosen, where)
            # Bias, penalties and forbidden ends may leave nothing to draw from.
            spent = ~torch.isfinite(scores.amax(1))
            scores = scores.masked_fill(spent[:, None], 0.0)
            tokens[which], logprobs[which], source = draw(scores, chosen, where)
            bad[which] |= spent
            reported = [at for at, state in enumerate(chosen) if state.asks.tops_processed]
            sources |= {which[at]: (source, at) for at in reported}
        tokens.masked_fill_(bad, -1)
        spoiled = bad.tolist()
        tops = self._tops(logits, sources, states, spoiled)
        for i, state in enumerate(states):
            if not spoiled[i]:
                state.history.note(tokens[i])
        return Samples(tokens, logprobs.masked_fill(bad, 0.0), tops)

    # -- parts ---------------------------------------------------------------------------------

    def _state(self, row: int) -> _Row:
        state = self._rows[row]
        assert state is not None, f"row {row} belongs to nobody"
        return state

    def _groups(self, states: list[_Row]) -> list[tuple[_Draw, list[int]]]:
        """How the rows that are not plain are drawn: (how, which rows)."""
        busy = [i for i, state in enumerate(states) if not state.asks.plain]
        greedy = [i for i in busy if not states[i].params.do_sample]
        cut = [i for i in busy if states[i].params.do_sample and states[i].asks.truncates]
        whole = [i for i in busy if states[i].params.do_sample and not states[i].asks.truncates]
        ways: list[tuple[_Draw, list[int]]] = [
            (self._draw_best, greedy),
            (self._draw_truncated, cut),
            (self._draw_whole, whole),
        ]
        return [(draw, which) for draw, which in ways if which]

    def _processed(
        self, logits: torch.Tensor, states: list[_Row], positions: list[int]
    ) -> torch.Tensor:
        """[m, vocab] scores after everything that comes before temperature."""
        if not any(state.asks.edited for state in states):
            return logits
        scores = logits.clone()
        for row, state, position in zip(scores, states, positions, strict=True):
            if state.params.watermark:
                row += watermark_bias(state.history.previous, self._vocab_size, self._device)
            if state.asks.penalised:
                penalise(row, state.params, state.history)
            if position < state.asks.min_new_tokens:
                row[state.ends] = -torch.inf
        return scores

    def _draw_best(
        self, scores: torch.Tensor, states: list[_Row], positions: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, _Distributions]:
        """The highest processed score of each row."""
        del positions  # nothing is random here
        tokens = argmax(scores)
        if not any(state.asks.logprobs for state in states):
            logprobs = torch.zeros(len(states), dtype=torch.float32, device=self._device)
        else:
            logprobs = logprobs_of(scores, tokens)
        return tokens, logprobs, _Distributions(scores)

    def _draw_whole(
        self, scores: torch.Tensor, states: list[_Row], positions: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, _Distributions]:
        """Draws from the whole vocabulary."""
        scores = self._tempered(scores, states)
        noise = vocabulary_noise(*self._counters(states, positions), self._vocab_size)
        # argmax of log p - log E: the order of p / E without underflow.
        tokens = argmax(scores - noise.log())
        return tokens, logprobs_of(scores, tokens), _Distributions(scores)

    def _draw_truncated(
        self, scores: torch.Tensor, states: list[_Row], positions: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, _Distributions]:
        """Draws from what truncation leaves."""
        kept = truncate(self._tempered(scores, states), [state.params for state in states])
        seed, stream, where = (c[:, None] for c in self._counters(states, positions))
        if 4 * kept.ids.shape[1] < self._vocab_size:
            noise = token_noise(seed, stream, where, kept.ids)
        else:  # one counter serves four tokens of the whole vocabulary
            whole = vocabulary_noise(seed[:, 0], stream[:, 0], where[:, 0], self._vocab_size)
            noise = whole.gather(1, kept.ids)
        at = argmax(kept.scores - noise.log())[:, None]
        logprobs = (kept.scores.gather(1, at) - log_mass(kept.scores)).to(torch.float32)
        tokens = kept.ids.gather(1, at)
        return tokens.squeeze(1), logprobs.squeeze(1), _Distributions(kept.scores, kept.ids)

    def _tempered(self, scores: torch.Tensor, states: list[_Row]) -> torch.Tensor:
        """[m, vocab] scores over temperature, the highest of each row at 0.

        In this order a tiny temperature drives the others to -inf rather than the highest to inf.
        """
        tiny = torch.finfo(torch.float32).tiny
        temperatures = [[max(state.params.temperature, tiny)] for state in states]
        scores = scores - scores.amax(1, keepdim=True)
        return scores.div_(torch.tensor(temperatures, device=self._device))

    def _counters(
        self, states: list[_Row], positions: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n] each: seeds, streams, positions."""
        numbers = torch.tensor(
            [
                [signed(state.params.seed), state.asks.stream, position]
                for state, position in zip(states, positions, strict=True)
            ],
            dtype=torch.int64,
            device=self._device,
        )
        return numbers[:, 0], numbers[:, 1], numbers[:, 2]

    def _tops(
        self,
        logits: torch.Tensor,
        sources: dict[int, tuple[_Distributions, int]],
        states: list[_Row],
        bad: list[bool],
    ) -> list[tuple[int, list[int], list[float]]]:
        tops = []
        for i, state in enumerate(states):
            if state.asks.top_n == 0 or bad[i]:
                continue
            if state.asks.tops_processed:
                source, at = sources.get(i, (_Distributions(logits), i))  # a plain row's are raw
                tops.append((i, *source.tops(at, state.asks.top_n)))
            else:
                ids = top_tokens(logits[i], min(state.asks.top_n, self._vocab_size))
                values = logits[i : i + 1].log_softmax(1)[0, ids]
                tops.append((i, ids.tolist(), values.tolist()))
        return tops


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """[n] int64: the highest score of each row, the lowest id in ties; a NaN counts as highest."""
    if scores.device.type == "cpu":
        # numpy's is more than ten times faster than torch's on a CPU.
        return torch.from_numpy(scores.numpy().argmax(axis=1))
    return scores.argmax(dim=1)


def logprobs_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[n] float32: log probability of one token a row.

    log_softmax takes every row by itself. (A sum over one long row is split among threads, over
    many rows it is not: logsumexp would make bits depend on the batch.)

    Args:
        scores: [n, vocab] float32.
        tokens: [n] int64.
    """
    return scores.log_softmax(1).gather(1, tokens[:, None]).squeeze(1)


def top_tokens(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Ids of the n highest scores and of all that tie with the last, at most MOST_TOP_TOKENS.

    By falling score, the lowest id first in ties.

    Args:
        scores: [vocab] float32.
        n: at most vocab.
    """
    ids = (scores >= scores.topk(n).values[-1]).nonzero().flatten()
    order = scores[ids].argsort(descending=True, stable=True)
    return ids[order][:MOST_TOP_TOKENS]


def prompt_logprobs(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
    """[n] float32: log probability of each prompt token after the one before it, of raw logits.

    Args:
        logits: [n, vocab] float32.
        next_tokens: [n] int64.
    """
    return logprobs_of(logits, next_tokens)


def _rows(values: torch.Tensor, which: list[int]) -> torch.Tensor:
    """These rows, in rising order; all of them are not copied."""
    return values if len(which) == len(values) else values[which]
