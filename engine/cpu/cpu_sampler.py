"""Sampling on a CPU: every row of a batch by its own columns.

The processors run in the order that `SamplingParams` documents, and a neutral one is not run at
all, so it changes no bit. A greedy row without penalties costs an argmax.
"""

from __future__ import annotations

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
from tokenpod.engine.cpu.cpu_draws import (
    Distributions,
    Draw,
    Rows,
    argmax,
    draw_best,
    draw_truncated,
    draw_whole,
    top_tokens,
)
from tokenpod.engine.sampling.processors import History, edit
from tokenpod.engine.sampling.sampler import LeaderTokens, Records, Sampler, Samples, logprobs_of
from tokenpod.kernels.operations.group import Group

Ints = npt.NDArray[np.int64]


def cpu_sampler(group: Group | None, *, rows: int, vocab_size: int) -> CpuSampler | LeaderTokens:
    """The sampler of a rank, or what followers have in place of one."""
    if group is not None and group.rank > 0:
        return LeaderTokens(group, rows=rows, device=torch.device("cpu"))
    return CpuSampler(rows=rows, vocab_size=vocab_size, group=group)


class CpuSampler(Sampler):
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
        #: Live rows that ask for more than the best token.
        self._asking: set[int] = set()
        #: [rows] 0, 1 and so on.
        self._each = np.arange(rows)

    def _set_row(self, row: int, new: NewRow) -> None:
        """Give a row to a sequence."""
        super()._set_row(row, new)
        self._histories.pop(row, None)
        columns = self.columns[row]
        self._asking.discard(row)
        if columns["flags"]:
            self._asking.add(row)
        if columns["flags"] & EDITED:
            self._histories[row] = History(new, columns, self._vocab_size)

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        super().clear_row(row)
        self._histories.pop(row, None)
        self._asking.discard(row)

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
            masks: as `DeviceSampler.begin` has them.
        """
        raw = logits
        if masks is not None:
            logits = logits + _forbidden(masks, self._vocab_size)
        values = logits.numpy()
        # The lowest id in ties; a NaN counts as highest.
        best = values.argmax(axis=1)
        none = ~np.isfinite(values[self._each[: len(rows)], best])
        tokens = torch.from_numpy(best)
        if self._asking.isdisjoint(rows):
            if none.any():
                best[none] = -1
            self._broadcast(tokens)
            return Samples.of_tokens(tokens)
        columns = self._words[rows].view(self._table.dtype)[:, 0]
        flags = columns["flags"]
        bad = torch.from_numpy(none)
        is_plain = (flags & (DRAWS | EDITED)) == 0
        logprobs = torch.zeros(len(rows), dtype=torch.float32)
        asked = (is_plain & (columns["logprobs"] != 0)).nonzero()[0]
        if len(asked):
            logprobs[asked] = logprobs_of(_some(logits, asked), _some(tokens, asked))
        # What rows were drawn from whose top tokens are of that, and where in it they are.
        sources: dict[int, tuple[Distributions, int]] = {}
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
    ) -> list[tuple[Draw, Rows]]:
        """How the rows that are not plain are drawn, and which rows."""
        flags, where = columns["flags"], np.array(positions, np.int64)
        draws, cuts = (flags & DRAWS) != 0, (flags & CUTS) != 0
        ways: list[tuple[Draw, npt.NDArray[np.bool_]]] = [
            (draw_best, ~draws & ((flags & EDITED) != 0)),
            (draw_truncated, draws & cuts),
            (draw_whole, draws & ~cuts),
        ]
        groups = []
        for draw, which in ways:
            at = which.nonzero()[0]
            if len(at):
                histories = [self._histories.get(rows[i]) for i in at.tolist()]
                groups.append((draw, Rows(at, columns[at], where[at], histories)))
        return groups

    def _processed(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[m, vocab] scores after everything that comes before temperature."""
        if not any(rows.histories):
            return logits
        scores = logits.clone()
        for i, history in enumerate(rows.histories):
            if history is not None:
                edit(scores[i], rows.columns[i], history, int(rows.positions[i]))
        return scores

    def _tops(
        self,
        raw: torch.Tensor,
        allowed: torch.Tensor,
        columns: Records,
        sources: dict[int, tuple[Distributions, int]],
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
                source, at = sources.get(i, (Distributions(allowed), i))
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


def _some(values: torch.Tensor, which: Ints) -> torch.Tensor:
    """These rows, in rising order; all of them are not copied."""
    return values if len(which) == len(values) else values[torch.from_numpy(which)]
