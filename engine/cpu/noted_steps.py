"""Plain decode steps of few rows, each number of which is noted once and then played.

    the first steps of n rows    computed
    the next                     computed and noted
    the one behind that          played, and computed: both must find the same logits
    all others                   played

Python is most of a step of few rows, where each loop runs for some microseconds, and a tenth of one
of 64. Steps of many rows are filled up, so that few sizes serve a batch that dwindles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenpod.engine.steps.integers import Counts, Integers, StepWords
from tokenpod.kernels.compiled.tape import Tape
from tokenpod.kernels.operations.batch import Run

#: Rows of a noted step: with more of them products take most of the time.
MOST_ROWS = 64
#: Up to so many rows a step is as long as it is; a longer one is a multiple of `_FILLED`.
_EXACT, _FILLED = 16, 4
#: Steps of a size before one is noted: a batch that dwindles passes through many sizes once.
_BEFORE = 6
#: Bytes that all noted steps may keep.
MOST_BYTES = 64 << 20


def filled_to(rows: int) -> int:
    """The rows of the noted step in which so many are computed."""
    return rows if rows <= _EXACT else -(-rows // _FILLED) * _FILLED


@dataclass(slots=True)
class _Noted:
    tape: Tape
    #: [n, vocabulary], overwritten each time.
    logits: torch.Tensor
    #: Whether it has found the logits of another step.
    proved: bool = False


class NotedSteps:
    """The steps of one model and pool."""

    def __init__(self) -> None:
        #: By rows; None: steps of so many can't be played.
        self._noted: dict[int, _Noted | None] = {}
        self._left = MOST_BYTES
        #: By rows: steps that may still pass before one is noted. One row's is noted as the engine
        #: warms up, so that what notes and plays is compiled before anybody waits.
        self._before: defaultdict[int, int] = defaultdict(lambda: _BEFORE, {1: 0})
        #: By rows: integers as numpy and as torch sees them, where a step finds them each time.
        self._integers: dict[int, tuple[Integers, Integers]] = {}

    def integers(self, rows: int) -> tuple[Integers, Integers]:
        """Of a step of so many rows."""
        if rows not in self._integers:
            counts = Counts.decode(rows)
            words = torch.empty(counts.words, dtype=torch.int64)
            views = StepWords(words.numpy()).of(counts), StepWords(words).of(counts)
            self._integers[rows] = views
        return self._integers[rows]

    def logits(
        self,
        compute: Callable[[], torch.Tensor],
        b_runs: Sequence[list[Run]],
        b_context: Sequence[int],
    ) -> torch.Tensor:
        """[n, vocabulary] of a step whose integers are filled in.

        Args:
            compute: makes them by the model, from `integers`.
            b_runs: of each row, where its keys and values lie.
            b_context: how many there are.
        """
        rows = len(b_runs)
        if self._before[rows]:
            self._before[rows] -= 1
            return compute()
        if rows not in self._noted:
            return self._note(rows, compute)
        noted = self._noted[rows]
        if noted is None:
            return compute()
        if not all(plan.refresh(b_runs, b_context) for plan in noted.tape.plans):
            return compute()
        if noted.proved:
            noted.tape.play()
            return noted.logits
        noted.tape.play()
        played = noted.logits.clone()
        # Behind it: what a wrong tape has written of keys and values is written over.
        found = compute()
        # The same bits, those of NaN too.
        noted.proved = torch.equal(found.view(torch.uint8), played.view(torch.uint8))
        if not noted.proved:
            self._noted[rows] = None
        return found

    def _note(self, rows: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        tape = Tape()
        with tape:
            logits = compute()
        whole = tape.whole and tape.nbytes <= self._left and logits.is_contiguous()
        self._noted[rows] = _Noted(tape, logits) if whole else None
        self._left -= tape.nbytes * whole
        return logits
