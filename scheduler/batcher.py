"""The in-pod batcher: first come, first served within a priority, no stall for running streams.

A step holds a token of every decoding sequence, then pieces of prompts up to the step's budget, in
the order of admission. The head of the queue waits until it fits; nobody overtakes it within its
priority, so nobody starves.

    waiting --admitted--> prefilling --prompt computed--> decoding
                 siblings wait for the first sample's prompt, then compute its last token
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from tokenpod.scheduler.forecast import Forecast
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.work import Limits, Work


class Batcher:
    """Plans the sequences of `Generate`."""

    def __init__(self, limits: Limits, kv: KV, rows: Rows) -> None:
        self.stalls = 0
        self.waiting_tokens = 0
        self._limits = limits
        self._kv = kv
        self._rows = rows
        self._arrivals = 0
        #: (-priority, arrival, samples), in order.
        self._waiting: list[tuple[int, int, list[Sequence]]] = []
        self._prefilling: deque[Sequence] = deque()
        #: Siblings in the house whose prompt is not settled, by its first sample's id.
        self._siblings: dict[int, list[Sequence]] = {}
        self._decoding: dict[int, Sequence] = {}
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
        return len(self._prefilling) + len(self._decoding) + sum(map(len, self._siblings.values()))

    @property
    def has_prompts(self) -> bool:
        """Whether prompt tokens are to be processed."""
        return bool(self._prefilling or self._waiting)

    def queue(self, samples: list[Sequence]) -> None:
        """Add a request to the queue."""
        self._arrivals += 1
        request = samples[0].request
        insort(self._waiting, (-request.priority, self._arrivals, samples))
        self.waiting_tokens += len(request.prompt)
        if self._waiting[0][2] is samples:
            self._full = False

    def forecast(self, frozen: Iterable[Sequence] = ()) -> Forecast:
        """The need of everything in the house."""
        forecast = Forecast(self.quantum)
        forecast.decoding(self._decoding.values())
        forecast.prefilling(self._in_line())
        forecast.frozen(frozen)
        return forecast

    def plan(self, now: int, *, prefill_tokens: int, frozen: Iterable[Sequence]) -> list[Work]:
        """This step's works; `frozen` are the sequences that routers hold."""
        works = self._decode()
        self._admit(frozen)
        budget = max(prefill_tokens, self.quantum)
        while self._prefilling and budget > 0:
            sequence = self._prefilling[0]
            n = min(sequence.prompt_length - sequence.computed, budget)
            works.append(prompt_work(self._kv, sequence, n, now))
            budget -= n
            if not sequence.prefilling:
                self._prefilling.popleft()
                self._decoding[sequence.id] = sequence
        return works

    def prompt_settled(self, sequence: Sequence) -> None:
        """A prompt is in the tree now: let its siblings start."""
        for sibling in reversed(self._siblings.pop(sequence.id, [])):
            self._kv.begin(sibling)
            self._rows.give(sibling)
            self._prefilling.appendleft(sibling)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended or was aborted."""
        if self._decoding.pop(sequence.id, None):
            return
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        for at, (_, _, samples) in enumerate(self._waiting):
            if sequence in samples:
                samples.remove(sequence)
                if not samples:
                    del self._waiting[at]
                    self.waiting_tokens -= sequence.prompt_length
                    self._full = False
                return
        self._leave_siblings(sequence)

    def released(self) -> None:
        """Slots or rows have come free."""
        self._full = False

    def late(self, now: int) -> list[Sequence]:
        """Sequences whose deadline has passed, and waiting ones whose time limit has."""
        late = [s for s in self._running() if _past(s.request.deadline_at, now)]
        for _, _, samples in self._waiting:
            request = samples[0].request
            if _past(request.deadline_at, now) or _past(request.stopping.time_limit_at, now):
                late += samples
        return late

    # -- parts ---------------------------------------------------------------------------------

    def _running(self) -> Iterator[Sequence]:
        yield from self._decoding.values()
        yield from self._in_line()

    def _in_line(self) -> Iterator[Sequence]:
        """Sequences whose prompts are still to be computed, siblings after their first sample."""
        for sequence in self._prefilling:
            yield sequence
            yield from self._siblings.get(sequence.id, ())
        for first, siblings in self._siblings.items():
            if first in self._decoding:
                yield from siblings

    def _decode(self) -> list[Work]:
        works = []
        kv = self._kv
        for sequence in self._decoding.values():
            if sequence.launched >= sequence.request.stopping.max_new_tokens:
                continue
            if not kv.available:
                # Admission makes this impossible; if it is not, pausing beats failing.
                self.stalls += 1
                continue
            slots = kv.extend(sequence, 1)
            works.append(Work(sequence, sequence.computed, 1, slots, True))
            sequence.computed += 1
            sequence.launched += 1
        return works

    def _admit(self, frozen: Iterable[Sequence]) -> None:
        while self._waiting and not self._full:
            samples = self._waiting[0][2]
            first = samples[0]
            if len(samples) > self._rows.free - self._promised_rows():
                self._full = True
                return
            self._kv.begin(first)
            self._prefilling.append(first)
            if len(samples) > 1:
                self._siblings[first.id] = samples[1:]
            if self.forecast(frozen).peak() > self._limits.slots:
                self._prefilling.pop()
                self._siblings.pop(first.id, None)
                self._kv.release(first)
                first.shared = first.cached = first.computed = 0
                self._full = True
                return
            self._rows.give(first)
            self._waiting.pop(0)
            self.waiting_tokens -= first.prompt_length

    def _promised_rows(self) -> int:
        """Rows that siblings will take."""
        return sum(map(len, self._siblings.values()))

    def _leave_siblings(self, sequence: Sequence) -> None:
        """Take a sequence out of a group whose prompt is not settled.

        If it was to compute the prompt, the next sample does.
        """
        if orphans := self._siblings.pop(sequence.id, None):
            heir, *rest = orphans
            self._kv.begin(heir)
            self._rows.give(heir)
            self._prefilling.appendleft(heir)
            if rest:
                self._siblings[heir.id] = rest
            return
        for first, siblings in self._siblings.items():
            if sequence in siblings:
                siblings.remove(sequence)
                if not siblings:
                    del self._siblings[first]
                return


def prompt_work(kv: KV, sequence: Sequence, n: int, now: int) -> Work:
    """The next `n` prompt tokens of a sequence."""
    sequence.began_at = sequence.began_at or now
    start = sequence.computed
    slots = kv.extend(sequence, n)
    sequence.computed += n
    done = not sequence.prefilling
    sequence.launched += done
    return Work(sequence, start, n, slots, needs_logits=done)


def _past(moment: int | None, now: int) -> bool:
    return moment is not None and now >= moment
