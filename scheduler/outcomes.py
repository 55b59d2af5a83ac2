"""What the tokens of a step mean for the sequences that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing

from tokenpod.core.outputs import Drafted, FailureCode, Started
from tokenpod.core.plan import UNSAMPLED
from tokenpod.scheduler.batcher import Batcher
from tokenpod.scheduler.beam_search import Top
from tokenpod.scheduler.beams import Group
from tokenpod.scheduler.constrained import Constrained
from tokenpod.scheduler.counts import Counts
from tokenpod.scheduler.drafting import Drafting, Landed
from tokenpod.scheduler.ends import failures
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.routed import Routed
from tokenpod.scheduler.sequence import END_STATES, EndState, Owner, Sequence
from tokenpod.scheduler.step import Step
from tokenpod.scheduler.work import Settled


class Outcomes:
    """Takes tokens.

    Args:
        kv: of the scheduler, as the next four.
        batcher: plans what follows.
        routed: its like for routers.
        constrained: who waits for masks.
        drafting: who has drafts; None: nobody.
        counts: what has been counted since the start.
        end: ends a sequence in a state.
        refuse: ends a sequence, by its id, for want of an allowed token.
    """

    def __init__(
        self,
        kv: KV,
        batcher: Batcher,
        routed: Routed,
        constrained: Constrained,
        drafting: Drafting | None,
        *,
        counts: Counts,
        end: Callable[[Sequence, EndState], None],
        refuse: Callable[[int], None],
    ) -> None:
        self._kv = kv
        self._batcher = batcher
        self._routed = routed
        self._constrained = constrained
        self._drafting = drafting
        self._counts = counts
        self._end = end
        self._refuse = refuse

    def check_drafts(
        self, step: Step, tokens: Listing[int], took: int, drafting_ns: int
    ) -> Mapping[int, Landed]:
        """Take back what wrong drafts of a step have computed; see `Drafting.land`."""
        if self._drafting is None:
            return {}
        drafted = self._drafting.land(step, tokens, took, drafting_ns)
        for draft in drafted.values():
            self._routed.taken_back(draft.sequence, draft.wrong)
        return drafted

    def take_each(
        self,
        step: Step,
        tokens: Listing[int],
        tops: Mapping[int, Top],
        drafted: Mapping[int, Landed],
        now: int,
        settled: Settled,
    ) -> None:
        """Append a step's tokens, and note in `settled` what they mean.

        Args:
            step: whose outcome it is.
            tokens: see `Scheduler.settle`, as `tops`.
            tops: of beams, by index into `tokens`.
            drafted: what has become of drafts, by sequence.
            now: in nanoseconds.
            settled: changed in place.
        """
        for at, (sequence, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if sequence.group is not None:
                self._take_tops(sequence.group, sequence, tops.get(at), now, settled)
            elif token != UNSAMPLED:
                if self._drafting and sequence.id not in drafted:
                    self._drafting.watch(sequence, token)
                self.take(sequence, token, at, now, settled)
            elif sequence.constrained and not sequence.dead and at in step.rows_of_firsts:
                row = step.rows_of_firsts[at]
                # Drafts that may be wrong have been taken back.
                self._postpone(sequence, 1 + (row in step.forced) * step.drafts_of(row))

    def counted(self, draft: Landed) -> Drafted:
        """Count a row's drafts, and tell of them."""
        self._counts.drafts(draft.drafted, draft.accepted)
        return Drafted(draft.sequence.id, draft.drafted, draft.accepted)

    def take(self, sequence: Sequence, token: int, at: int, now: int, settled: Settled) -> None:
        """Append a token of a sequence, sample `at` of its step."""
        sequence.keep = sequence.keep and token >= 0
        if sequence.ended_as is not None:
            # Sampled after its end, before that was seen.
            return
        if token < 0 and sequence.constrained and sequence.request.sampling.bad_words:
            # What the mask allows, its bad words forbid; which these are now, the sampler knows.
            self._refuse(sequence.id)
            return
        if token < 0:
            self._spoil(sequence, settled)
            return
        finish = sequence.append(token, now)
        if not sequence.proven:
            if len(sequence.outputs) == 1:
                self._start(sequence, settled)
            self._batcher.inputs_proven(sequence)
        settled.sequence_ids.append(sequence.id)
        settled.token_ids.append(token)
        settled.finishes.append(finish)
        settled.samples.append(at)
        if finish:
            self._end(sequence, END_STATES[finish])

    def _postpone(self, sequence: Sequence, n: int) -> None:
        """The mask of a row was late: its last `n` positions are computed again once it comes."""
        self._kv.take_back(sequence, n)
        sequence.launched -= n
        if sequence.owner is Owner.ROUTER:
            self._routed.unsampled(sequence, n)
        self._constrained.pause(sequence)

    def _take_tops(
        self, group: Group, sequence: Sequence, top: Top | None, now: int, settled: Settled
    ) -> None:
        """Take what the search of a beam needs; once it has that of all beams, they go on."""
        sequence.keep = sequence.keep and top is not None
        if sequence.dead:
            return
        if top is None:
            self._spoil(sequence, settled)
            return
        if not group.take(sequence, top):
            return
        if not group.begun:
            self._start(group.first, settled)
        if parents := group.advance(now):
            self._batcher.branched(group, parents)
            return
        finish = group.report(settled)
        self._end(group.first, END_STATES[finish])

    def _start(self, sequence: Sequence, settled: Settled) -> None:
        """The first token of a sequence has come."""
        # Virtual tokens are not the client's.
        cached = max(sequence.cached - sequence.request.virtual_tokens, 0)
        settled.started.append(Started(sequence.id, cached, sequence.began_at))
        if not sequence.stream:
            # Samples share their prompt: it counts once.
            self._counts.prompt_tokens += len(sequence.request.prompt)
            self._counts.cached_tokens += cached
            if sequence.node is not None:
                self._kv.tree.use(sequence.node)

    def _spoil(self, sequence: Sequence, settled: Settled) -> None:
        problem = "the model computed NaN or Inf for this sequence"
        settled.failures += failures(sequence, FailureCode.DATA_LOSS, problem)
        self._end(sequence, EndState.ABORTED)
