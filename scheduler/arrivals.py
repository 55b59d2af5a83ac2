"""Requests become sequences, and these are queued."""

from __future__ import annotations

import msgspec

from tokenpod.core.outputs import FailureCode
from tokenpod.core.requests import Request
from tokenpod.scheduler.adapter_slots import AdapterSlots
from tokenpod.scheduler.constrained import Constrained
from tokenpod.scheduler.drafting import Drafting
from tokenpod.scheduler.given import VectorIds
from tokenpod.scheduler.queue import Queue
from tokenpod.scheduler.refusals import never_fits
from tokenpod.scheduler.sequence import Group, Owner, Sequence
from tokenpod.scheduler.table import Table
from tokenpod.scheduler.work import Limits


class Arrivals:
    """Takes requests.

    Args:
        limits: the engine's resources.
        sequences: every sequence that exists, by id; new ones are added.
        table: gets their columns.
        adapters: their slots.
        drafting: decides who has drafts; None: nobody.
        queue: takes those that can wait for a row.
        constrained: takes those that wait for masks before.
    """

    def __init__(
        self,
        limits: Limits,
        sequences: dict[int, Sequence],
        *,
        table: Table,
        adapters: AdapterSlots,
        drafting: Drafting | None,
        queue: Queue,
        constrained: Constrained,
    ) -> None:
        self._limits = limits
        self._sequences = sequences
        self._table = table
        self._adapters = adapters
        self._drafting = drafting
        self._queue = queue
        self._constrained = constrained
        self._vectors = VectorIds()

    def refusal(self, request: Request) -> tuple[str, FailureCode] | None:
        """Why a request can never run; None: it can."""
        if problem := never_fits(request, self._limits):
            return problem, FailureCode.INVALID_ARGUMENT
        if not self._adapters.knows(request.adapter):
            return "its adapter has been unloaded", FailureCode.NOT_FOUND
        return None

    def make(self, request: Request, owner: Owner) -> list[Sequence]:
        """The sequences of a request, which nobody has queued yet."""
        if not self._adapters.knows(request.adapter):
            # A router's: it is the base model's then, as of any other name.
            request = _of_base(request)
        prompt = self._vectors.prompt_of(request)
        samples = range(len(request.sequence_ids))
        sequences = [Sequence(request, i, prompt, self._table, owner) for i in samples]
        self._sequences |= {sequence.id: sequence for sequence in sequences}
        for sequence in sequences:
            self._adapters.enter(sequence)
        if request.beam is not None:
            group = Group(request, request.beam, sequences)
            for sequence in sequences:
                sequence.group = group
        if self._drafting:
            self._drafting.began(sequences)
        return sequences

    def enqueue(self, samples: list[Sequence]) -> None:
        """Queue new samples; under a constraint once it is compiled and has its first mask."""
        self._queue.number(samples)
        self._wait(samples)

    def requeue(self, samples: list[Sequence]) -> None:
        """Queue samples that were admitted and have to begin anew, in their old place."""
        for sequence in samples:
            self._adapters.give_back(sequence)
        self._wait(samples)
        self._queue.freed()

    def _wait(self, samples: list[Sequence]) -> None:
        if samples[0].constrained:
            self._constrained.hold(samples)
        else:
            self._queue.add_again(samples)


def _of_base(request: Request) -> Request:
    """The same of the base model."""
    return msgspec.structs.replace(request, adapter=0, virtual_tokens=0, virtual_kv=False)
