"""Sampling on a CPU: every row of a batch by its own columns.

The processors run in the order that `SamplingParams` documents, and a neutral one is not run at
all, so it changes no bit. A greedy row without penalties costs an argmax. A row that truncates its
distribution (top_k, top_p, min_p, typical_p) is reduced to its surviving tokens before anything is
drawn; noise depends on the token's id, so the draw is the same as over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.new_row import NewRow
from tokenpod.core.sampling import (
    CUTS,
    DRAWS,
    EDITED,
    MOST_TOP_TOKENS,
    PROCESSED_TOPS,
    TABLE,
    SamplingTable,
)
from tokenpod.engine.processors import History, edit, log_mass, truncate
from tokenpod.engine.rng import token_noise, vocabulary_noise
from tokenpod.engine.sampler import LeaderTokens, Records, Sampler, Samples, logprobs_of
from tokenpod.kernels.group import Group

Ints = npt.NDArray[np.int64]


def host_sampler(group: Group | None, *, rows: int, vocab_size: int) -> HostSampler | LeaderTokens:
    """The sampler of a rank, or what followers have in place of one."""
    if group is not None and group.rank > 0:
        return LeaderTokens(group, rows=rows, device=torch.device("cpu"))
    return HostSampler(rows=rows, vocab_size=vocab_size, group=group)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step that are drawn in the same way."""

    #: [m] where they are in the step.
    at: Ints
    #: [m] their columns.
    columns: Records
    #: [m] which output token of its sequence is drawn, from 0.
    positions: Ints
    #: [m] None where nothing is edited.
    histories: list[History | None]


@dataclass(frozen=True, slots=True)
class _Distributions:
    """What m rows' tokens are drawn from."""

    #: [m, k] scores, -inf where a token can't be drawn.
    scores: torch.Tensor
    #: [m, k] which tokens' scores they are; None: the whole vocabulary's.
    ids: torch.Tensor | None = None

    def tops(self, at: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log probabilities of a row's n most likely tokens and of all that tie.

        They are computed as the drawn token's log probability is, so that its own is the same.
        """
        scores = self.scores[at : at + 1]
        best = top_tokens(scores[0], min(n, scores.shape[1]))
        best = best[scores[0, best] > -torch.inf]
        if self.ids is None:
            return best, scores.log_softmax(1)[0, best]
        values = (scores - log_mass(scores)).to(torch.float32)
        return self.ids[at, best], values[0, best]


#: Processed scores and their rows to tokens, log probabilities, and what they are drawn from.
_Draw = Callable[[torch.Tensor, _Rows], tuple[torch.Tensor, torch.Tensor, _Distributions]]


class HostSampler(Sampler):
    """Draws on the CPU; see `Sampler` for the arguments."""

    def __init__(
        self,
        *,
        rows: int,
        vocab_size: int,
        group: Group | None = None,
        table: SamplingTable = TABLE,
    ) -> None:
        super().__init__(rows=rows, vocab_size=vocab_size, group=group, table=table)
        #: By live row whose scores are edited.
        self._histories: dict[int, History] = {}

    def set_row(self, row: int, new: NewRow) -> None:
        """Give a row to a sequence."""
        super().set_row(row, new)
        self._histories.pop(row, None)
        columns = self.columns[row]
        if columns["flags"] & EDITED:
            self._histories[row] = History(new, columns, self._vocab_size)

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        super().clear_row(row)
        self._histories.pop(row, None)

    def sample(
        self,
        logits: torch.Tensor,
        rows: list[int],
        positions: list[int],
        masks: torch.Tensor | None = None,
    ) -> Samples:
        """Draw one token for each row, and broadcast them.

        Args:
            logits: [n, vocab_size] float32; not changed.
            rows: n rows, each once.
            positions: n; which output token of its sequence is drawn, from 0.
            masks: as `DeviceSampler.sample` has them.
        """
        raw = logits
        if masks is not None:
            logits = logits + _forbidden(masks, self._vocab_size)
        columns = self._words[rows].view(self._table.dtype)[:, 0]
        flags = columns["flags"]
        tokens = argmax(logits)
        best = logits.numpy()[np.arange(len(rows)), tokens.numpy()]
        bad = torch.from_numpy(~np.isfinite(best))
        if not flags.any():
            # The best tokens are all that anybody wants to know.
            tokens.masked_fill_(bad, -1)
            self._broadcast(tokens)
            return Samples.of_tokens(tokens)
        is_plain = (flags & (DRAWS | EDITED)) == 0
        logprobs = torch.zeros(len(rows), dtype=torch.float32)
        asked = (is_plain & (columns["logprobs"] != 0)).nonzero()[0]
        if len(asked):
            logprobs[asked] = logprobs_of(_some(logits, asked), _some(tokens, asked))
        # What rows were drawn from whose top tokens are of that, and where in it they are.
        sources: dict[int, tuple[_Distributions, int]] = {}
        groups = [] if is_plain.all() else self._groups(rows, columns, positions)
        for draw, some in groups:
            scores = self._processed(_some(logits, some.at), some)
            # Bias, penalties and forbidden ends may leave nothing to draw from.
            spent = ~torch.isfinite(scores.amax(1))
            scores = scores.masked_fill(spent[:, None], 0.0)
            tokens[some.at], logprobs[some.at], source = draw(scores, some)
            bad[some.at] |= spent
            reported = np.flatnonzero(some.columns["flags"] & PROCESSED_TOPS).tolist()
            sources |= {int(some.at[i]): (source, i) for i in reported}
        tokens.masked_fill_(bad, -1)
        logprobs.masked_fill_(bad, 0.0)
        tops = self._tops(raw, logits, columns, sources, bad)
        samples = Samples(tokens, logprobs, *tops, ranks_of(raw, tokens, columns))
        if (flags & EDITED).any():
            self._note(rows, tokens)
        self._broadcast(tokens)
        return samples

    def propose(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        """[n] what a draft model's logits draw for each row, broadcast; no row's history changes.

        With the noise and the columns of `sample`, so that drafts and tokens differ only as far as
        the models do. Penalties know no draft of the same step: some that they forbid are drawn.

        Args:
            logits: [n, vocab_size] float32; not changed.
            rows, positions: as `sample` has them.
        """
        columns = self._words[rows].view(self._table.dtype)[:, 0]
        drafts = argmax(logits)
        for draw, some in self._groups(rows, columns, positions):
            scores = self._processed(_some(logits, some.at), some)
            spent = ~torch.isfinite(scores.amax(1))
            drafts[some.at] = draw(scores.masked_fill(spent[:, None], 0.0), some)[0]
        self._broadcast(drafts)
        return drafts

    # -- parts ---------------------------------------------------------------------------------

    def _groups(
        self, rows: list[int], columns: Records, positions: list[int]
    ) -> list[tuple[_Draw, _Rows]]:
        """How the rows that are not plain are drawn, and which rows."""
        flags, where = columns["flags"], np.array(positions, np.int64)
        draws, cuts = (flags & DRAWS) != 0, (flags & CUTS) != 0
        ways: list[tuple[_Draw, npt.NDArray[np.bool_]]] = [
            (self._draw_best, ~draws & ((flags & EDITED) != 0)),
            (self._draw_truncated, draws & cuts),
            (self._draw_whole, draws & ~cuts),
        ]
        groups = []
        for draw, which in ways:
            at = which.nonzero()[0]
            if len(at):
                histories = [self._histories.get(rows[i]) for i in at.tolist()]
                groups.append((draw, _Rows(at, columns[at], where[at], histories)))
        return groups

    def _processed(self, logits: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """[m, vocab] scores after everything that comes before temperature."""
        if not any(rows.histories):
            return logits
        scores = logits.clone()
        for i, history in enumerate(rows.histories):
            if history is not None:
                edit(scores[i], rows.columns[i], history, int(rows.positions[i]))
        return scores

    def _draw_best(
        self, scores: torch.Tensor, rows: _Rows
    ) -> tuple[torch.Tensor, torch.Tensor, _Distributions]:
        """The highest processed score of each row."""
        tokens = argmax(scores)
        if not rows.columns["logprobs"].any():
            logprobs = torch.zeros(len(tokens), dtype=torch.float32)
        else:
            logprobs = logprobs_of(scores, tokens)
        return tokens, logprobs, _Distributions(scores)

    def _draw_whole(
        self, scores: torch.Tensor, rows: _Rows
    ) -> tuple[torch.Tensor, torch.Tensor, _Distributions]:
        """Draws from the whole vocabulary."""
        scores = tempered(scores, rows)
        noise = vocabulary_noise(*counters(rows), self._vocab_size)
        # argmax of log p - log E: the order of p / E without underflow.
        tokens = argmax(scores - noise.log())
        return tokens, logprobs_of(scores, tokens), _Distributions(scores)

    def _draw_truncated(
        self, scores: torch.Tensor, rows: _Rows
    ) -> tuple[torch.Tensor, torch.Tensor, _Distributions]:
        """Draws from what truncation leaves."""
        kept = truncate(tempered(scores, rows), rows.columns)
        numbers = counters(rows)
        if 4 * kept.ids.shape[1] < self._vocab_size:
            seed, stream, where = (number[:, None] for number in numbers)
            noise = token_noise(seed, stream, where, kept.ids)
        else:  # one counter serves four tokens of the whole vocabulary
            noise = vocabulary_noise(*numbers, self._vocab_size).gather(1, kept.ids)
        at = argmax(kept.scores - noise.log())[:, None]
        logprobs = (kept.scores.gather(1, at) - log_mass(kept.scores)).to(torch.float32)
        tokens = kept.ids.gather(1, at)
        return tokens.squeeze(1), logprobs.squeeze(1), _Distributions(kept.scores, kept.ids)

    def _tops(
        self,
        raw: torch.Tensor,
        allowed: torch.Tensor,
        columns: Records,
        sources: dict[int, tuple[_Distributions, int]],
        bad: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`top_ids` and `top_logprobs`, from the logits before masks and after."""
        asked = columns["top_n"].nonzero()[0].tolist()
        shape = (len(raw), MOST_TOP_TOKENS if asked else 0)
        top_ids = torch.full(shape, -1, dtype=torch.int64)
        top_logprobs = torch.zeros(shape, dtype=torch.float32)
        for i in asked:
            if bad[i]:
                continue
            n = min(int(columns["top_n"][i]), self._vocab_size)
            if columns["flags"][i] & PROCESSED_TOPS:
                # A plain row's scores are not processed.
                source, at = sources.get(i, (_Distributions(allowed), i))
                ids, values = source.tops(at, n)
            else:
                ids = top_tokens(raw[i], n)
                values = raw[i : i + 1].log_softmax(1)[0, ids]
            top_ids[i, : len(ids)], top_logprobs[i, : len(ids)] = ids, values
        return top_ids, top_logprobs

    def _note(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Add the drawn tokens to the rows' histories; -1 is none."""
        columns = self.columns
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if token < 0:
                continue
            columns["length"][row] += 1
            columns["previous"][row] = token
            if (history := self._histories.get(row)) is not None:
                history.note(token)


def ranks_of(logits: torch.Tensor, tokens: torch.Tensor, columns: Records) -> torch.Tensor | None:
    """[n] as `Samples.ranks` has them.

    Args:
        logits: [n, vocab] float32.
        tokens: [n] int64.
        columns: [n], the rows'.
    """
    asked = columns["ranks"].nonzero()[0].tolist()
    if not asked:
        return None
    ranks = torch.zeros_like(tokens)
    for i in asked:
        if tokens[i] >= 0:
            ranks[i] = (logits[i] > logits[i, tokens[i]]).sum() + 1
    return ranks


def _forbidden(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[n, vocab_size] float32: 0 where a bit is set, -inf where not."""
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    # Added, so that NaN and Inf stay what they are and the row is found out.
    return torch.from_numpy(np.where(bits[:, :vocab_size], np.float32(0), np.float32(-np.inf)))


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """[n] int64: the highest score of each row, the lowest id in ties; a NaN counts as highest."""
    # numpy's is more than ten times faster than torch's on a CPU.
    return torch.from_numpy(scores.numpy().argmax(axis=1))


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


def tempered(scores: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """[m, vocab] scores over temperature, the highest of each row at 0.

    In this order a tiny temperature drives the others to -inf rather than the highest to inf.
    """
    temperatures = torch.from_numpy(rows.columns["temperature"].astype(np.float32))
    return (scores - scores.amax(1, keepdim=True)).div_(temperatures[:, None])


def counters(rows: _Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[m] int64 each: seeds, streams, positions."""
    seeds, streams = rows.columns["seed"].copy(), rows.columns["stream"].copy()
    return torch.from_numpy(seeds), torch.from_numpy(streams), torch.from_numpy(rows.positions)


def _some(values: torch.Tensor, which: Ints) -> torch.Tensor:
    """These rows, in rising order; all of them are not copied."""
    return values if len(which) == len(values) else values[torch.from_numpy(which)]
