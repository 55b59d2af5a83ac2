"""One sample of a request, and its progress."""

from __future__ import annotations

from enum import Enum, auto
from operator import attrgetter

import numpy as np

from tokenpod.core.outputs import FinishCode
from tokenpod.core.positions import spans_of
from tokenpod.core.requests import BeamParams, Request
from tokenpod.scheduler.pool.offload_tier import Offloaded
from tokenpod.scheduler.pool.radix import Node, Tokens
from tokenpod.scheduler.pool.slot_allocator import Extent
from tokenpod.scheduler.pool.snapshots import Snapshot
from tokenpod.scheduler.pool.tails import Tails
from tokenpod.scheduler.pool.windows import Trail
from tokenpod.scheduler.sequences.beam_search import BeamSearch, Top
from tokenpod.scheduler.sequences.table import Table
from tokenpod.scheduler.sequences.work import Settled

#: In `Settled.samples`: a token of a result, which was chosen in an earlier step.
_NOT_SAMPLED = -1


class Owner(Enum):
    """Whose a sequence is, and so which planner steps it."""

    #: The batcher: a token in every step.
    BATCHER = auto()
    #: A router, by `Advance`.
    ROUTER = auto()
    #: The scheduler: a liveness probe runs at once, in a row that is reserved for it.
    PROBE = auto()


class Planner:
    """Decides when its sequences are stepped; what the scheduler tells it about one of them.

    A planner does nothing about what it has not overridden; `planner.StepPlanner` has the rest.
    """

    owner = Owner.BATCHER

    def start(self, samples: list[Sequence]) -> None:
        """A request has been admitted: its first sample has a row, the others are promised one."""

    def inputs_settled(self, sequence: Sequence) -> None:
        """The first output after a sequence's needed positions has settled."""

    def taken_back(self, sequence: Sequence, n: int) -> None:
        """The last `n` positions of a sequence are to be computed again: drafts were wrong."""

    def unsampled(self, sequence: Sequence, n: int) -> None:
        """A sequence got none of the `n` tokens of the step that settles: its mask was late."""

    def drop(self, sequence: Sequence) -> None:
        """An admitted sequence has ended, as `ended_as` says; it has its slots until `released`."""

    def released(self, sequence: Sequence) -> None:
        """The slots and the row of a sequence that has ended are free."""


#: Of sequences that nobody steps: in tests of memory.
NO_PLANNER = Planner()


class State(Enum):
    """Where a sequence is on its way."""

    #: In the queue, or held until its first mask is there.
    WAITING = auto()
    #: The same, and the host's memory has what it had computed before it was preempted.
    SWAPPED = auto()
    #: Admitted: its planner steps it.
    RUNNING = auto()
    #: Nothing more is planned, and what comes back is dropped.
    ENDED = auto()


class EndState(Enum):
    """How a sequence ended, by vLLM's names. A request ends as its last sample does."""

    #: End of text, a stop token or a stop sequence.
    STOPPED = auto()
    #: Its new tokens or its time were used up.
    LENGTH = auto()
    #: Its client gave it up, its deadline passed, or it failed.
    ABORTED = auto()
    #: Refused, because it could never fit.
    IGNORED = auto()


#: What the finish codes mean that end a sequence.
END_STATES = {
    FinishCode.LENGTH: EndState.LENGTH,
    FinishCode.TIME_LIMIT: EndState.LENGTH,
    FinishCode.EOS: EndState.STOPPED,
    FinishCode.STOP_TOKEN: EndState.STOPPED,
    FinishCode.CONSTRAINT: EndState.STOPPED,
    FinishCode.ABORTED: EndState.ABORTED,
}


class Counted:
    """An int of a sequence that lies in a column of the table."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self._column = attrgetter(name)

    def __get__(self, sequence: Sequence, owner: type) -> int:
        return int(self._column(sequence.table)[sequence.place])

    def __set__(self, sequence: Sequence, value: int) -> None:
        self._column(sequence.table)[sequence.place] = value


class Sequence:
    """One sample's tokens, and the slots of its keys and values.

    Its positions are prompt, then outputs. `computed` of them have their keys and values written or
    being written; `launched` outputs have been sampled or are being sampled. `needed` positions
    must be computed before the next output can be sampled: those of the prompt, and of a sequence
    that was preempted also those of the outputs that it had.

    Args:
        request: prompt, sampling and stopping.
        stream: which of the request's samples.
        prompt: the request's, as an array that all samples share.
        table: has the columns, at `place`, until `leave`.
        planner: decides when it is stepped.
    """

    def __init__(
        self,
        request: Request,
        stream: int,
        prompt: Tokens,
        table: Table,
        planner: Planner = NO_PLANNER,
    ) -> None:
        self.id = request.sequence_ids[stream]
        self.request = request
        self.planner = planner
        self.stream = stream
        self.table = table
        self.place = table.take()
        table.adapted += request.adapter > 0
        self.constrained = request.constraint is not None
        table.constrained += self.constrained
        table.masked[self.place] = self.constrained
        self.pooled = request.pooling is not None
        table.pooling += self.pooled
        table.pooled[self.place] = self.pooled
        #: Positions, from and to, that are computed in one step, since they see each other.
        self.spans = spans_of(request)
        #: [needed] the tokens at the positions that must be computed.
        self.inputs = prompt
        table.id[self.place] = self.id
        table.needed[self.place] = self.needed
        table.bound[self.place] = self.bound
        # Beams follow one another's tokens.
        table.drafts[self.place] = request.drafts if request.beam is None else 0
        #: An output has been sampled after all of `inputs` had been computed.
        self.proven = False
        #: The queue admits it and takes it back, and the scheduler ends it.
        self.state = State.WAITING
        #: All samples of its request whose slots are not free yet, itself among them.
        self.samples = [self]
        #: Its place in the queue within its priority.
        self.arrival = 0
        self.outputs: list[int] = []
        #: Prompt tokens that were found in the tree when it was first admitted.
        self.cached = 0
        #: Where its adapter lies while it runs, from 1; 0: it has none.
        self.adapter_slot = 0
        #: When its first step was planned, in nanoseconds; 0: not yet.
        self.began_at = 0
        self.finish = FinishCode.RUNNING
        #: How it ended; None: it has not.
        self.ended_as: EndState | None = None
        #: Whether what it computes may get into the tree: not if it is read for its vectors, and
        #: not once it has computed NaN or Inf.
        self.keep = not self.pooled
        #: The locked tree node that ends its shared prefix, of `shared` tokens.
        self.node: Node | None = None
        #: Private slots, by position.
        self.extents: list[Extent] = []
        #: Its window slots; None: it has none, or those of its search are with `tails`.
        self.trail: Trail | None = None
        #: What of it lies in the host's memory, where anything does; see `Offload`.
        self.offloaded: Offloaded | None = None
        #: Of a beam: what it has in place of `extents`, together with the others of its search.
        self.tails: Tails | None = None
        #: Of a beam: its search.
        self.group: Group | None = None
        # Where rows keep states; see `States`.
        #: Those that it has made and the tree does not hold yet, by position.
        self.snapshots: list[Snapshot] = []
        #: Behind how many positions it has made the last one.
        self.snapped = 0
        #: What its row begins with, until it has.
        self.origin: Snapshot | None = None
        #: Whether its row's states are further than it: a late mask has taken a position back.
        self.behind = False

    def leave(self) -> None:
        """Give the place in the table back: the sequence has ended and has no slots."""
        self.table.give_back(self.place)
        self.table.adapted -= self.request.adapter > 0
        self.table.constrained -= self.constrained
        self.table.pooling -= self.pooled
        self.place = 0
        self.samples.remove(self)

    def begin_after(self, node: Node, length: int) -> None:
        """Begin behind a prefix of `length` tokens, which ends at the locked `node`."""
        self.node = node
        self.shared = self.computed = length
        if not self.began_at:
            self.cached = length

    def end(self, state: EndState) -> None:
        """Plan nothing more, and drop what comes back."""
        self.state, self.ended_as = State.ENDED, state
        self.table.ended[self.place] = 1

    def restart(self) -> None:
        """Begin anew after a preemption: all tokens so far must be computed again.

        It has no step in flight and no slots.
        """
        assert not self.in_flight
        assert self.node is None
        self.inputs = self.all_tokens(self.length)
        self.proven = self.behind = False
        self.table.plain[self.place] = 0
        self.table.needed[self.place] = self.needed
        self.computed = self.shared = 0

    row = Counted("The executor's row; -1: none.")
    computed = Counted("Positions whose keys and values are written, or being written.")
    shared = Counted("Of these, the first ones that are in the tree.")
    launched = Counted("Outputs that have been sampled or are being sampled.")
    in_flight = Counted("Steps launched and not settled.")
    paused = Counted("Whether its next mask is late; nothing of it is planned until it comes.")
    drafted = Counted("Drafted tokens in the step in flight.")

    branch = Counted("Where a piece of its prompt ends, because others may go on otherwise; 0: no.")

    @property
    def owner(self) -> Owner:
        """Whose it is."""
        return self.planner.owner

    @property
    def dead(self) -> bool:
        """Ended, aborted or failed: nothing more is planned, and what comes back is dropped."""
        return self.state is State.ENDED

    @property
    def alive(self) -> int:
        """Samples of its request that have not ended."""
        return sum(not sample.dead for sample in self.samples)

    @property
    def reported(self) -> list[int]:
        """The ids by which clients hear of it."""
        return [self.id] if self.group is None else self.request.reported

    @property
    def prompt_length(self) -> int:
        """Positions of the prompt, those of virtual tokens before it included."""
        return self.request.positions

    @property
    def ready_tokens(self) -> int:
        """Virtual tokens before the prompt whose keys and values an adapter has."""
        return self.request.virtual_tokens * self.request.virtual_kv

    @property
    def needed(self) -> int:
        """Positions that must be computed before an output can be sampled."""
        return len(self.inputs)

    @property
    def bound(self) -> int:
        """Positions that will be computed at most: the last token's keys are never written."""
        return self.request.positions + self.request.stopping.max_new_tokens - 1

    @property
    def length(self) -> int:
        """Tokens known to exist: prompt and settled outputs."""
        return self.request.positions + len(self.outputs)

    @property
    def to_compute(self) -> int:
        """While it prefills: positions to launch before an output can be sampled."""
        return len(self.inputs) - self.computed

    @property
    def next_piece(self) -> int:
        """Of these, how many a step may compute at most."""
        cut = self.branch if self.branch > self.computed else self.needed
        for start, end in self.spans:
            if self.computed < start:
                cut = min(cut, start)
            elif self.computed < end:
                cut = end
        return cut - self.computed

    @property
    def least_piece(self) -> int:
        """Of these, how many a step must compute if it computes any."""
        return self.whole(1)

    def whole(self, count: int) -> int:
        """So many of these, or as many more as do not cut a span."""
        at = self.computed + count
        return next((end for start, end in self.spans if start < at < end), at) - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether there are such positions."""
        return self.computed < len(self.inputs)

    @property
    def scored(self) -> bool:
        """Whether log probabilities of the prompt's tokens are wanted of the next steps."""
        return self.request.prompt_logprobs and self.stream == 0 and not self.outputs

    @property
    def fetching(self) -> bool:
        """Whether copies to its slots are under way."""
        return self.offloaded is not None and self.offloaded.flying

    @property
    def late(self) -> bool:
        """Whether it waits for copies: nobody knows when its next tokens can be computed."""
        return self.offloaded is not None and (self.offloaded.flying or self.offloaded.to_fetch > 0)

    @property
    def private(self) -> int:
        """Slots that are not in the tree."""
        return self.computed - self.shared

    def all_tokens(self, n: int) -> Tokens:
        """[n] the first tokens of prompt and outputs, int32."""
        since = self.outputs[len(self.inputs) - self.prompt_length :]
        return np.concatenate((self.inputs, np.asarray(since, dtype=np.int32)))[:n]

    def append(self, token: int, now: int) -> FinishCode:
        """Add a sampled token.

        Args:
            token: its id.
            now: in nanoseconds, for the time limit.

        Returns why it ends the sequence, or RUNNING.
        """
        self.outputs.append(token)
        self.finish = self._finish(token, now)
        return self.finish

    def prove(self) -> None:
        """An output has come behind all that it needs: most that follow are plain ones."""
        self.proven = True
        stopping = self.request.stopping
        if not (self.constrained or self.group or stopping.time_limit_at is not None):
            self.table.plain[self.place] = stopping.max_new_tokens

    def _finish(self, token: int, now: int) -> FinishCode:
        stopping = self.request.stopping
        count = len(self.outputs)
        last = count >= stopping.max_new_tokens
        if last and stopping.length_first:
            return FinishCode.LENGTH
        if count > stopping.min_new_tokens or last:
            if token in stopping.eos_token_ids:
                return FinishCode.EOS
            if token in stopping.stop_token_ids:
                return FinishCode.STOP_TOKEN
        if last:
            return FinishCode.LENGTH
        if stopping.time_limit_at is not None and now >= stopping.time_limit_at:
            return FinishCode.TIME_LIMIT
        return FinishCode.RUNNING


class Group:
    """One search, and its sequences.

    Args:
        request: with a `beam`.
        params: of it.
        sequences: one for each beam.
    """

    def __init__(self, request: Request, params: BeamParams, sequences: list[Sequence]) -> None:
        self.request = request
        self.sequences = sequences
        #: Whether the last of the prompt has been planned; and has settled, so that all have rows.
        self.launched = False
        self.begun = False
        #: Which sequence computes which of the search's beams, in their order.
        self.carriers = sequences[:1]
        self._search = BeamSearch(params, request.stopping)
        #: By sequence, of the step that settles.
        self._tops: dict[Sequence, Top] = {}

    @property
    def first(self) -> Sequence:
        """The sequence that computes the prompt."""
        return self.sequences[0]

    def take(self, sequence: Sequence, top: Top) -> bool:
        """Take the most likely next tokens of one sequence; whether those of all are there."""
        self._tops[sequence] = top
        return len(self._tops) == len(self.carriers)

    def advance(self, now: int) -> dict[Sequence, Sequence]:
        """Extend all beams: which sequence goes on from which; none: the search is over.

        A beam stays with its sequence, if no better one has continued the same beginning.
        """
        tops = [self._tops[sequence] for sequence in self.carriers]
        self._tops = {}
        parents = [self.carriers[i] for i in self._search.step(tops, now)]
        if not parents:
            return {}
        carriers: list[Sequence | None] = []
        for parent in parents:
            carriers.append(None if parent in carriers else parent)
        free = iter([s for s in self.sequences if s not in carriers])
        self.carriers = [carrier or next(free) for carrier in carriers]
        for carrier, beam in zip(self.carriers, self._search.beams, strict=True):
            carrier.outputs = beam.tokens
        return dict(zip(self.carriers, parents, strict=True))

    def report(self, settled: Settled) -> FinishCode:
        """The search is over: add its results, the best first; how the best one has ended."""
        for sequence_id, result in zip(self.request.reported, self._search.results, strict=False):
            for token, logprob in zip(result.beam.tokens, result.beam.logprobs, strict=True):
                settled.logprobs[len(settled.token_ids)] = logprob
                settled.sequence_ids.append(sequence_id)
                settled.token_ids.append(token)
                settled.finishes.append(FinishCode.RUNNING)
                settled.samples.append(_NOT_SAMPLED)
            settled.finishes[-1] = result.finish
        return self._search.results[0].finish
