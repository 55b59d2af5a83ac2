"""Who runs next: the queue, those who plan what it has let in, and the step that they share.

queue --admitted--> routed (a router's), batcher (callers')    probes, which never wait here
                            \\____________|____________________/
                                         step
"""

from __future__ import annotations

from collections.abc import Callable

from tokenpod.scheduler.adapter_slots import AdapterSlots
from tokenpod.scheduler.admission import Admission
from tokenpod.scheduler.batcher import Batcher
from tokenpod.scheduler.batching import Batching
from tokenpod.scheduler.drafting import Drafting
from tokenpod.scheduler.forced import Forced
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.ledger import Ledger
from tokenpod.scheduler.probe import Probes
from tokenpod.scheduler.queue import Queue
from tokenpod.scheduler.routed import Routed
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Owner, Sequence
from tokenpod.scheduler.step import StepBuilder


class Planners:
    """Shares rows, slots and each step's budget of prompt tokens.

    Args:
        kv: of the scheduler, as the next six.
        rows: of the executor.
        adapters: their slots.
        admission: who joins, and who gives way.
        batching: when the batcher's requests join, and what its part of a step holds.
        forced: which tokens are forced.
        drafting: decides who has drafts; None: nobody.
        prefill_tokens: of prompts in a step, at most; probes have a budget of their own.
        swapped_first: what is swapped to the host's memory joins before all that waits.
        requeue: takes samples that were admitted and have to begin anew.
        swaps: whether what a preempted sequence has computed goes to the host's memory.
    """

    def __init__(
        self,
        kv: KV,
        rows: Rows,
        adapters: AdapterSlots,
        *,
        admission: Admission,
        batching: Batching,
        forced: Forced,
        drafting: Drafting | None,
        prefill_tokens: int,
        swapped_first: bool,
        requeue: Callable[[list[Sequence]], None],
        swaps: Callable[[Sequence], bool],
    ) -> None:
        self._kv = kv
        self._rows = rows
        self._admission = admission
        self._prefill_tokens = prefill_tokens
        self.batcher = Batcher(
            kv, rows, admission, batching, requeue, forced, drafting, swaps=swaps
        )
        self.routed = Routed(rows, forced, drafting)
        self.probes = Probes(kv, rows)
        self.queue = Queue(
            kv,
            rows,
            {Owner.BATCHER: self.batcher, Owner.ROUTER: self.routed},
            ledger=self.ledger,
            joining=lambda waiting: batching.joining(self.batcher.running, waiting),
            adapters=adapters,
            swapped_first=swapped_first,
        )

    @property
    def busy(self) -> bool:
        """Whether anybody waits for a row, or could be advanced."""
        queued = len(self.queue) + len(self.probes)
        return bool(self.batcher.running or queued or self.routed.ops)

    @property
    def slots_for_batcher(self) -> int:
        """Slots that have been promised neither to routers' sequences nor to probes."""
        return self._kv.available - self.routed.reserved - self.probes.reserved

    def ledger(self) -> Ledger:
        """A ledger with everything that has been admitted."""
        ledger = self._admission.ledger()
        self.batcher.add_to(ledger)
        self.routed.add_to(ledger)
        return ledger

    def admit(self) -> None:
        """Let in who may join: nobody, and nothing that was swapped out, if a step lacks room."""
        if self.queue.may_admit and not self.batcher.lacks_room(self.slots_for_batcher):
            self.queue.admit()

    def plan(self, step: StepBuilder) -> None:
        """Add to a step: if routers and the batcher have prompts, each gets half of the budget."""
        batcher, budget = self.batcher, self._prefill_tokens
        self.routed.plan(step, budget - budget // 2 if batcher.has_prompts else budget)
        batcher.plan(step, budget - step.prompt_tokens, self.slots_for_batcher)
        self.probes.plan(step)

    def released(self, sequence: Sequence) -> None:
        """A sequence has ended and its slots are free: so is its row."""
        self._rows.give_back(sequence)
        for planner in (self.batcher, self.routed, self.probes):
            planner.released(sequence)
        self.queue.freed()

    def ends(self, sequence: Sequence) -> None:
        """A sequence has ended, and has its slots yet."""
        self._admission.ended(sequence)

    def landed(self) -> None:
        """Copies to the host's memory or from it have arrived."""
        self.batcher.settled()
        self.queue.freed()

    def check(self) -> None:
        """Raise AssertionError unless routers have been promised what their sequences may take."""
        promised = sum(s.bound - s.computed for s in self.routed.sequences)
        assert promised == self.routed.reserved, (promised, self.routed.reserved)
