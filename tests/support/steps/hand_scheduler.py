"""A scheduler by hand: sequences lie in the slots, and steps hold the tokens, that a test says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from tokenpod.kernels.operations.batch import ForwardBatch, Run
from tokenpod.models.decoders.decoder import Decoder

MAX_POSITIONS = 256
CPU = torch.device("cpu")


@dataclass
class Sequence:
    """What a scheduler knows of one sequence."""

    row: int
    tokens: list[int]
    #: Slots of the positions so far, in order.
    slots: list[int] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        runs: list[Run] = []
        for slot in self.slots:
            if runs and runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], slot + 1)
            else:
                runs.append((slot, slot + 1))
        return runs


class HandScheduler:
    """Places sequences in slots and runs steps, each as the test says."""

    def __init__(self, model: Decoder, *, slots: int = 512, rows: int = 16) -> None:
        self.model = model
        config = model.config
        self.shares = config.own_state is None
        self.pool = model.pool_class(
            slots=slots,
            layouts=config.kv_layouts,
            dtype=model.dtype,
            device=CPU,
        )
        for tensor in (*self.pool.keys, *self.pool.values):
            tensor.fill_(float("nan"))  # what nobody wrote must not be read
        self.row_table = torch.zeros((rows, MAX_POSITIONS), dtype=torch.int32)
        self.free = list(range(slots))
        self.rows = 0

    def sequence(self, tokens: list[int], *, prefix_of: Sequence | None = None, shared: int = 0):
        """A new sequence whose first `shared` positions are another's."""
        sequence = Sequence(self.rows, list(tokens))
        self.pool.take_row(self.rows, len(tokens))
        self.rows += 1
        if prefix_of is not None:
            assert tokens[:shared] == prefix_of.tokens[:shared]
            sequence.slots = prefix_of.slots[:shared]
        return sequence

    def skip_slots(self, count: int, *, every: int = 1) -> None:
        """Make the next slots handed out begin later, or lie apart."""
        self.free = self.free[count::every]

    def step(self, works: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Process so many tokens of each; logprobs [n, vocabulary] of each, in order of `works`."""
        order = sorted(range(len(works)), key=lambda i: works[i][1] != 1)
        tokens, positions, slots, starts = [], [], [], [0]
        for i in order:
            sequence, count = works[i]
            first = len(sequence.slots)
            for position in range(first, first + count):
                slot = self.free.pop(0)
                sequence.slots.append(slot)
                tokens.append(sequence.tokens[position])
                positions.append(position)
                slots.append(slot)
            context = len(sequence.slots)
            self.row_table[sequence.row, :context] = torch.tensor(sequence.slots)
            starts.append(len(tokens))
        batch = ForwardBatch(
            t_token=torch.tensor(tokens),
            t_place=torch.tensor(positions),
            t_slot=torch.tensor(slots),
            b_start=starts,
            b_context=[len(works[i][0].slots) for i in order],
            b_runs=[works[i][0].runs for i in order],
            b_row=[works[i][0].row for i in order],
            row_table=self.row_table,
            single_rows=sum(count == 1 for _, count in works),
            logit_index=torch.arange(len(tokens)),
        )
        hidden = self.model.forward(batch, self.pool)
        logprobs = self.model.logits(hidden[batch.logit_index]).float().log_softmax(-1)
        results: list[torch.Tensor] = [torch.empty(0)] * len(works)
        for place, i in enumerate(order):
            results[i] = logprobs[starts[place] : starts[place + 1]]
        return results

    def greedy(self, sequence: Sequence, count: int) -> list[int]:
        """Process what is left of the tokens, then generate."""
        for _ in range(count):
            (logprobs,) = self.step([(sequence, len(sequence.tokens) - len(sequence.slots))])
            sequence.tokens.append(int(logprobs[-1].argmax()))
        return sequence.tokens[-count:]


class Adapted:
    """A model of which each row of a step has the adapter in a slot of that number."""

    def __init__(self, model, slots):
        self._model, self._slots = model, slots

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch, pool):
        column = [s for row, s in enumerate(self._slots) for _ in range(*self._tokens(batch, row))]
        self._batch = replace(batch, t_adapter=torch.tensor(column))
        return self._model.forward(self._batch, pool)

    def logits(self, hidden, step=None):
        return self._model.logits(hidden, replace(self._batch, logit_index=None))

    def _tokens(self, batch, row):
        return batch.b_start[row], batch.b_start[row + 1]
