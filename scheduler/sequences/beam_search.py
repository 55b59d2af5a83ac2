"""Beam search: which beginnings of texts go on, and which are results. No memory, no rows.

The rules are those of transformers' `generate` (5.23), in its arithmetic (float32), so that results
are the same: beams are ranked by the sum of their tokens' log probabilities, results by that sum
over length^penalty, the length being all generated tokens, the one that ends it included.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np

from tokenpod.core.outputs import FinishCode
from tokenpod.core.requests import BeamParams, EarlyStop, StoppingParams

#: In place of the score of a result that is not there: transformers' number.
_NO_SCORE = np.float32(-1.0e9)

#: Tokens by falling log probability, and these: of the model's own distribution.
Top = tuple[Listing[int], Listing[float]]


@dataclass(frozen=True, slots=True)
class Beam:
    """The beginning of a text."""

    tokens: list[int]
    logprobs: list[float]
    #: Sum of the log probabilities.
    score: np.float32

    def then(self, token: int, logprob: float, score: np.float32) -> Beam:
        """The same with one token more."""
        return Beam([*self.tokens, token], [*self.logprobs, logprob], score)


@dataclass(frozen=True, slots=True)
class Result:
    """A text that has ended; `score` is what results are ranked by."""

    beam: Beam
    score: np.float32
    finish: FinishCode


class BeamSearch:
    """The search of one request.

    Args:
        params: width, penalty and end of the search.
        stopping: what ends a text.
    """

    def __init__(self, params: BeamParams, stopping: StoppingParams) -> None:
        self._params = params
        self._stopping = stopping
        self._ends = stopping.eos_token_ids | stopping.stop_token_ids
        #: The best first; at the beginning there is one, without a token.
        self.beams = [Beam([], [], np.float32(0))]
        #: The best first, at most `width`.
        self.results: list[Result] = []

    @staticmethod
    def needed_tops(width: int, ends: int) -> int:
        """Tokens of each beam that a step looks at: `width` that go on, and every end."""
        return width + ends

    def step(self, tops: Listing[Top], now: int) -> list[int]:
        """Extend the beams by a token.

        Args:
            tops: of each beam, in order; at least `needed_tops` tokens, or all that there are.
            now: in nanoseconds, for the time limit.

        Returns which of the beams each of the new ones continues; empty: the search is over.
        """
        width, limit = self._params.width, self._stopping.time_limit_at
        length = len(self.beams[0].tokens) + 1
        late = limit is not None and now >= limit
        last = late or length >= self._stopping.max_new_tokens
        goes_on: list[tuple[int, Beam]] = []
        ended: list[Result] = []
        for rank, (parent, token, beam) in enumerate(self._candidates(tops, length)):
            ends = token in self._ends
            if (ends or last) and rank < width:
                score = beam.score / self._divisor(length)
                ended.append(Result(beam, score, self._finish(token, length, late=late)))
            elif not ends and len(goes_on) < width:
                goes_on.append((parent, beam))
            if rank >= width - 1 and (last or len(goes_on) == width):
                break
        # Those that were there before come first where scores are the same.
        ranked = sorted([*self.results, *ended], key=lambda result: -result.score)
        self.results = ranked[:width]
        self.beams = [beam for _, beam in goes_on]
        if last or not self.beams or self._is_over(length):
            return []
        return [parent for parent, _ in goes_on]

    def _candidates(self, tops: Listing[Top], length: int) -> Iterator[tuple[int, int, Beam]]:
        """Parent, token, and the beam that they make: by falling score."""
        counts = [len(ids) for ids, _ in tops]
        parents = np.repeat(np.arange(len(tops)), counts)
        ids = np.concatenate([np.asarray(ids, np.int64) for ids, _ in tops])
        logprobs = np.concatenate([np.asarray(values, np.float32) for _, values in tops])
        scores = np.array([beam.score for beam in self.beams], np.float32)[parents] + logprobs
        order = (-scores).argsort(kind="stable")
        if length <= self._stopping.min_new_tokens:
            order = order[~np.isin(ids[order], [*self._ends])]
        found = parents[order].tolist(), ids[order].tolist(), logprobs[order].tolist()
        for parent, token, logprob, score in zip(*found, scores[order], strict=True):
            yield parent, token, self.beams[parent].then(token, logprob, score)

    def _divisor(self, length: int) -> np.float32:
        return np.float32(float(length) ** self._params.length_penalty)

    def _finish(self, token: int, length: int, *, late: bool) -> FinishCode:
        stopping = self._stopping
        if stopping.length_first and length >= stopping.max_new_tokens:
            return FinishCode.LENGTH
        if token in stopping.eos_token_ids:
            return FinishCode.EOS
        if token in stopping.stop_token_ids:
            return FinishCode.STOP_TOKEN
        return FinishCode.TIME_LIMIT if late else FinishCode.LENGTH

    def _is_over(self, length: int) -> bool:
        """Whether beams of `length` tokens can't, or by early stopping needn't, become results."""
        params = self._params
        full = len(self.results) == params.width
        if full and params.early_stopping is EarlyStop.TRUE:
            return True
        if params.early_stopping is EarlyStop.NEVER and params.length_penalty > 0:
            length = self._stopping.max_new_tokens
        worst = self.results[-1].score if full else _NO_SCORE
        return not self.beams[0].score / self._divisor(length) > worst
