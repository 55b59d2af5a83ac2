"""The in-pod batcher: first come, first served within a priority, no stall for running streams.

A step holds a token of every decoding sequence, then pieces of prompts up to the step's budget, in
the order of admission. The head of the queue waits until it fits; nobody overtakes it within its
priority, so nobody starves.

    waiting --admitted--> prefilling --prompt launched--> decoding
          siblings --the first sample's prompt settled--> ready (their last token) --> decoding
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from tokenpod.scheduler.forecast import Forecast
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.work import Limits, Work

#: (-priority, arrival, samples): sorts in the order of service.
_Entry = tuple[int, int, list[Sequence]]


class Batcher:
    """Plans the sequences of `Generate`."""

    def __init__(self, limits: Limits, kv: KV, rows: Rows) -> None:
        self.stalls = 0
        self.waiting_tokens = 0
        self._limits = limits
        self._kv = kv
        self._rows = rows
        self._arrivals = 0
        self._waiting: list[_Entry] = []
        #: Requests that came since `before_first_token` was last asked.
        self._new: list[Sequence] = []
        self._prefilling: deque[Sequence] = deque()
        #: Samples whose prompt is in the tree but for its last token; before all of `_prefilling`.
        self._ready: deque[Sequence] = deque()
        #: Samples that wait for the prompt of the first, by the first's id.
        self._siblings: dict[int, _Entry] = {}
        self._decoding: dict[int, Sequence] = {}
        #: Ended, but with a step in flight, so that their slots are not free yet.
        self._leaving: dict[int, Sequence] = {}
        #: The head of the queue did not fit, and nothing has left since.
        self._full = False

    @property
    def quantum(self) -> int:
        """Prompt tokens that a step surely processes, whatever a router wants."""
        return max(self._limits.prefill_tokens // 2, 1)

    @property
    def waiting_requests(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences in the house."""
        siblings = sum(len(entry[2]) for entry in self._siblings.values())
        return len(self._ready) + len(self._prefilling) + len(self._decoding) + siblings

    @property
    def has_prompts(self) -> bool:
        """Whether prompt tokens are to be processed."""
        return bool(self._ready or self._prefilling or self._waiting)

    def before_first_token(self) -> list[Sequence]:
        """A sample of each request that is next to be computed, or under way; whoever is new too.

        Those in the middle of the queue were asked about when they came, and will be when their
        turn has come.
        """
        new, self._new = self._new, []
        head = [self._waiting[0][2][0]] if self._waiting else []
        return [*(s for s in new if not s.dead), *head, *self._prefilling]

    def queue(self, samples: list[Sequence]) -> None:
        """Add a request to the queue."""
        self._arrivals += 1
        self._new.append(samples[0])
        self._enqueue((-samples[0].request.priority, self._arrivals, samples))

    def forecast(self, frozen: Iterable[Sequence] = ()) -> Forecast:
        """The need of everything in the house, and of `frozen` sequences."""
        forecast = Forecast(self.quantum)
        forecast.leaving(self._leaving.values())
        forecast.decoding(self._decoding.values())
        for sequence in self._ready:
            forecast.prefilling(sequence)
        for first, (_, _, siblings) in self._siblings.items():
            if first in self._decoding:
                forecast.siblings(self._decoding[first], siblings)
        for sequence in self._prefilling:
            forecast.prefilling(sequence)
            if sequence.id in self._siblings:
                forecast.siblings(sequence, self._siblings[sequence.id][2])
        forecast.frozen(frozen)
        return forecast

    def plan(self, now: int, *, prefill_tokens: int, frozen: Iterable[Sequence]) -> list[Work]:
        """This step's works; `frozen` are the sequences that routers hold."""
        works = self._decode()
        if self._waiting and not self._full:
            self._admit(frozen)
        budget = max(prefill_tokens, self.quantum)
        while budget > 0 and (line := self._ready or self._prefilling):
            sequence = line[0]
            n = min(sequence.prompt_length - sequence.computed, budget)
            works.append(prompt_work(self._kv, sequence, n, now))
            budget -= n
            if not sequence.prefilling:
                line.popleft()
                self._decoding[sequence.id] = sequence
        return works

    def prompt_settled(self, sequence: Sequence) -> None:
        """A prompt has been computed: share it, and let its siblings start."""
        entry = self._siblings.pop(sequence.id, None)
        self._kv.share_prompt(sequence, awaited=entry is not None)
        if entry is None:
            return
        self._rows.promise(-len(entry[2]))
        for sibling in entry[2]:
            self._kv.follow(sibling, sequence)
            self._rows.give(sibling)
            self._ready.append(sibling)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended; what it holds stays with it until `released`."""
        if sequence.row < 0:
            self._remove_rowless(sequence)
        elif self._remove_running(sequence):
            self._leaving[sequence.id] = sequence

    def released(self, sequence: Sequence) -> None:
        """A sequence's slots and row have come free."""
        self._leaving.pop(sequence.id, None)
        self._full = False

    # -- admission -----------------------------------------------------------------------------

    def _enqueue(self, entry: _Entry) -> None:
        insort(self._waiting, entry)
        self.waiting_tokens += entry[2][0].prompt_length
        if self._waiting[0] is entry:
            self._full = False

    def _admit(self, frozen: Iterable[Sequence]) -> None:
        while self._waiting:
            rank, arrival, samples = self._waiting[0]
            first, *siblings = samples
            if len(samples) > self._rows.free:
                break
            self._kv.begin(first)
            self._prefilling.append(first)
            if siblings:
                self._siblings[first.id] = (rank, arrival, siblings)
            if self.forecast(frozen).peak() > self._limits.slots:
                self._prefilling.pop()
                self._siblings.pop(first.id, None)
                self._kv.withdraw(first)
                break
            self._rows.give(first)
            self._rows.promise(len(siblings))
            self._waiting.pop(0)
            self.waiting_tokens -= first.prompt_length
        else:
            return
        self._full = True

    # -- the end of a sequence -----------------------------------------------------------------

    def _remove_rowless(self, sequence: Sequence) -> None:
        """Forget one that waits, in the queue or for its sibling's prompt."""
        for at, (_, _, samples) in enumerate(self._waiting):
            if sequence in samples:
                samples.remove(sequence)
                if not samples:
                    del self._waiting[at]
                    self.waiting_tokens -= sequence.prompt_length
                self._full = False
                return
        for first, (_, _, siblings) in self._siblings.items():
            if sequence in siblings:
                siblings.remove(sequence)
                self._rows.promise(-1)
                if not siblings:
                    del self._siblings[first]
                return

    def _remove_running(self, sequence: Sequence) -> bool:
        """Forget one with a row; False if it is not ours."""
        if self._decoding.pop(sequence.id, None) is None:
            for line in (self._ready, self._prefilling):
                if sequence in line:
                    line.remove(sequence)
                    break
            else:
                return False
        if entry := self._siblings.pop(sequence.id, None):
            # The prompt that they wait for may never come: they go back to their place in the
            # queue, where admission counts anew what they need.
            self._rows.promise(-len(entry[2]))
            self._enqueue(entry)
        return True

    # -- decoding ------------------------------------------------------------------------------

    def _decode(self) -> list[Work]:
        works = []
        for sequence in self._decoding.values():
            if sequence.exhausted:
                continue
            if not self._kv.available:
                # Admission makes this impossible; if it is not, pausing beats failing.
                self.stalls += 1
                continue
            works.append(decode_work(self._kv, sequence))
        return works


def decode_work(kv: KV, sequence: Sequence) -> Work:
    """The next token of a sequence whose prompt has been launched."""
    position = sequence.computed
    slots = kv.extend(sequence, 1)
    sequence.computed = position + 1
    sequence.launched += 1
    return Work(sequence, position, 1, slots, True)


def prompt_work(kv: KV, sequence: Sequence, n: int, now: int) -> Work:
    """The next `n` prompt tokens of a sequence."""
    sequence.began_at = sequence.began_at or now
    start = sequence.computed
    slots = kv.extend(sequence, n)
    sequence.computed += n
    done = not sequence.prefilling
    sequence.launched += done
    return Work(sequence, start, n, slots, needs_logits=done)
