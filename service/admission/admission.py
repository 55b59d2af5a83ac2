"""The bounded queue: which calls are admitted, and which are refused at once.

A refusal is cheap: it happens before anything is tokenised or sent to the engine. So at ten times
the load that can be served, refusals take almost nothing from the calls that are served.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from msgspec.structs import replace

from tokenpod.core.outputs import Load
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.admission.memory_budget import LateMessages, MemoryBudget
from tokenpod.service.calls.errors import RETRY_SECONDS, ResourceExhausted, Unavailable
from tokenpod.service.config.sources import ServerSettings

#: The longest hint: what is waited for may be over sooner than estimated.
MOST_RETRY_SECONDS = 30.0
#: Why new calls are refused while the server stops.
DRAINING = "the server is draining"
#: Why new calls are refused while the engine has not settled a step for seconds, and the hint.
STALLED = "the engine makes no progress"
STALLED_RETRY_SECONDS = 5.0

_Answer = TypeVar("_Answer")


class Admission:
    """Counts the admitted requests of all front-end processes of the pod together.

    Limits hold for the pod, not for a process: where a connection lands is chance. Two processes
    that count at the same instant may let one too many in.

    Args:
        max_requests: `Generate` and `Tokens` calls at once, running and waiting together.
        max_queue_tokens: prompt tokens that may wait for their computation. Both are to be set
            before anything is taken in, if they depend on the engine.
        max_bytes: what calls may hold of the front ends' memory.
        max_message_bytes: of one message.
        counters: where the counts are; None: this process is alone.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_queue_tokens: int = 0,
        max_bytes: int = 2**63 - 1,
        max_message_bytes: int = 0,
        counters: PodCounters | None = None,
    ) -> None:
        self.max_requests = max_requests
        self.max_queue_tokens = max_queue_tokens
        self.counters = counters or PodCounters.create(1)
        self.memory = MemoryBudget(self.counters, max_bytes)
        self.turnover = Turnover(self.counters)
        self.late = LateMessages(self.memory, max_message_bytes)
        #: Why nothing is admitted: the server is starting or draining.
        self.closed: str | None = "the server is starting: the model is not loaded yet"
        #: When it is expected to be open again, by time.monotonic, and how long that is in all.
        self._opens_at = self._expected = 0.0

    @classmethod
    def of(cls, settings: ServerSettings, counters: PodCounters) -> Admission:
        """By the operator's limits; for unset ones, what they are at most."""
        return cls(
            max_requests=settings.resolved_concurrent_requests,
            max_bytes=settings.resolved_front_end_bytes,
            max_message_bytes=settings.max_message_bytes,
            counters=counters,
        )

    def drain(self) -> None:
        """Admit nothing more, in any process."""
        self.close(DRAINING, 0.0)
        self.counters.close()

    def whole(self, load: Load) -> Load:
        """The engine's load, with the requests that front ends refused because of their size."""
        ignored = load.ended.ignored + self.counters.ignored
        return replace(load, ended=replace(load.ended, ignored=ignored))

    def close(self, why: str, seconds: float) -> None:
        """Admit nothing more, for about so many seconds."""
        self.closed = why
        self._opens_at, self._expected = time.monotonic() + seconds, seconds

    def check_open(self) -> None:
        """Raise Unavailable while the server takes no new work."""
        if self.counters.closed:
            self.closed = DRAINING
        if self.closed:
            raise self.refusal()

    def refusal(self) -> Unavailable:
        """The error of calls that come while no new work is admitted."""
        # If it takes longer than expected, it may take much longer, and clients retry only a few
        # times.
        left = max(self._opens_at - time.monotonic(), self._expected / 3, RETRY_SECONDS)
        why = self.closed or DRAINING
        return Unavailable(
            why,
            retry_after=min(left, MOST_RETRY_SECONDS),
            state="draining" if why == DRAINING else "starting",
        )

    def check_room(self, seconds: float | None = None) -> None:
        """Raise what `enter` would raise now."""
        self.check_open()
        if self.counters.stalled:
            # A router's steps are let through: the error of one would end all that it runs.
            raise Unavailable(STALLED, retry_after=STALLED_RETRY_SECONDS, state="stalled")
        if (requests := self.counters.requests) >= self.max_requests:
            raise ResourceExhausted(
                f"{requests} requests are running or waiting; this server takes at most"
                f" {self.max_requests} (--max-concurrent-requests)",
                limit="max_concurrent_requests",
                retry_after=self._come_again(seconds),
            )
        if seconds is not None:
            self._check_time(seconds)

    def _check_time(self, seconds: float) -> None:
        """Refuse a call that would miss its deadline, before it makes others wait."""
        outlook = self.turnover.outlook()
        if outlook.fits(seconds):
            return
        late = outlook.wait + outlook.run - seconds
        raise ResourceExhausted(
            f"a call that comes now waits for about {outlook.wait:.1f} s and then runs for about"
            f" {outlook.run:.1f} s; this one's deadline is {seconds:.1f} s away",
            limit="deadline",
            retry_after=self._come_again(seconds, late),
        )

    def _come_again(self, seconds: float | None, least: float = 0.0) -> float:
        """The hint of a call that is refused for want of room.

        In tenths of a second, so that refusals are alike and cost less.
        """
        after = max(self.turnover.come_again(seconds), least, RETRY_SECONDS)
        return min(math.ceil(10 * after) / 10, MOST_RETRY_SECONDS)

    @contextmanager
    def enter(
        self, seconds: float | None = None, stream: RequestStream | None = None
    ) -> Iterator[Place]:
        """Hold a place for one call; raises Unavailable or ResourceExhausted at once.

        Args:
            seconds: until its deadline; None: it has none, or needs no row.
            stream: whose request it is, where calls send many; those under way have one place.
        """
        if stream is None:
            stream = RequestStream()
        if stream.under_way:
            self.check_open()
        else:
            self.check_room(seconds)
            self.counters.add(requests=1)
        place = Place(self)
        try:
            with stream.one_more():
                yield place
        finally:
            place.leave_queue()
            if not stream.under_way:
                self.counters.add(requests=-1)


class RequestStream:
    """Requests of one call that are under way: they hold one place together, as one call does."""

    def __init__(self) -> None:
        self.under_way = 0
        self._none = asyncio.Event()
        self._none.set()
        self._alone = asyncio.Lock()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """One of them."""
        self.under_way += 1
        self._none.clear()
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way:
                self._none.set()

    async def fitting(self, answer: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Answer a request that may need what the others of its stream hold: then it waits.

        Args:
            answer: called again, once none of the others is under way, if it ends with
                ResourceExhausted while some are.
        """
        try:
            return await answer()
        except ResourceExhausted:
            if not self.under_way:
                raise
        async with self._alone:
            while True:
                await self._none.wait()
                try:
                    return await answer()
                except ResourceExhausted:
                    # Later ones may have come first.
                    if not self.under_way:
                        raise


class Place:
    """One call's place among the admitted requests."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._waits = False
        self._tokens = 0

    def line_up(self) -> None:
        """Be counted among those that wait for a row."""
        self._waits = True
        self._admission.counters.add(waiting=1)

    def queue(self, prompt_tokens: int) -> None:
        """Join the queue; raises ResourceExhausted if it would overflow.

        An empty queue takes any prompt that the other limits allow.
        """
        waiting, most = self._admission.counters.waiting_tokens, self._admission.max_queue_tokens
        if waiting and waiting + prompt_tokens > most:
            raise ResourceExhausted(
                f"{waiting} prompt tokens are waiting; with the {prompt_tokens} of this request"
                f" the queue would exceed {most} (--max-queue-tokens)",
                limit="max_queue_tokens",
                retry_after=RETRY_SECONDS,
            )
        self._tokens = prompt_tokens
        self._admission.counters.add(waiting_tokens=prompt_tokens)

    def leave_queue(self) -> None:
        """The prompt has been computed, or the call is over."""
        self._admission.counters.add(waiting=-self._waits, waiting_tokens=-self._tokens)
        self._waits, self._tokens = False, 0


# -- how soon rows come free -------------------------------------------------------------------

#: Calls that must have ended before anything is estimated, and the least weight of the newest one.
_ENOUGH = 16
_WEIGHT = 1 / 64
#: The part of a call's time that its run may be estimated to take. The rest is for the network, for
#: longer steps, and for other calls.
_USABLE = 0.9
#: A call that waits for less than this part of its time is never refused: it may be a short one
#: among long ones.
_HARMLESS = 0.25


class Paced(Protocol):
    """An engine, as far as its pace goes."""

    load: Load
    #: Seconds that a step usually takes; 0: there was none yet.
    usual_step: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds until a call's first step begins, and from there to its end."""

    wait: float = 0.0
    run: float = 0.0

    def fits(self, seconds: float) -> bool:
        """Whether a call with so much time left is taken in."""
        return self.wait <= max(_USABLE * seconds - self.run, _HARMLESS * seconds)


class Turnover:
    """How soon rows come free: how long a new call waits and runs, from how long recent calls ran.

    A waiting call begins when a running one has ended. With c calls running, each for s seconds on
    average, a call behind n others begins after n * s / c. s is counted in steps and converted with
    the current time of a step, so that a burst is seen before its first calls have ended.

    Under overload the calls that are admitted have just the time that is estimated here. An
    estimate that is slightly too short makes all of them late; one that is too long refuses a few
    that might have been in time. So a call's run is estimated as the mean plus two mean deviations
    (as TCP estimates its timeout; Jacobson, "Congestion Avoidance and Control", 1988). Without a
    noticeable queue no call is refused.

    A refused call gets a hint of when to come again, as if the refused formed a queue of their own
    that moves as fast as calls end. If all of them came again after a second, a pod with ten times
    the load that it can serve would do little but refuse the same calls again.

    Args:
        counters: of the calls of all front ends.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, counters: PodCounters, now: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._now = now
        self._engine: Paced | None = None
        self._rows = 0
        self._ended = 0
        #: Steps of a call from its first to its last: their mean and mean deviation.
        self._steps = self._deviation = 0.0
        #: Calls that this process has refused and expects again, at a moment.
        self._refused = self._refused_at = 0.0

    def watch(self, engine: Paced, rows: int) -> None:
        """The engine is ready; it runs at most `rows` sequences."""
        self._engine, self._rows = engine, rows

    def note(self, seconds: float) -> None:
        """A call of this process has got its last token, so long after its first step began."""
        if self._engine is None or not self._engine.usual_step:
            return
        self._ended += 1
        off = seconds / self._engine.usual_step - self._steps
        weight = max(1 / self._ended, _WEIGHT)
        self._steps += weight * off
        # The first one is no deviation from anything.
        self._deviation += weight * (abs(off) * (self._ended > 1) - self._deviation)

    def begin_within(self, seconds: float, new_tokens: int) -> float:
        """Seconds within which a call has to begin, to end in so many: after them it is dropped.

        Args:
            new_tokens: that it asks for: it takes no more steps than that, and its prompt's.
        """
        if self._engine is None or self._ended < _ENOUGH:
            return seconds
        run = min(self._most_steps, new_tokens + 1) * self._engine.usual_step
        return max(seconds - run / _USABLE, _HARMLESS * seconds)

    def outlook(self) -> Outlook:
        """The estimate for a call that comes now; zeros while too little is known."""
        if self._engine is None or self._ended < _ENOUGH:
            return Outlook()
        running = self._engine.load.running
        # Each count includes too many: calls in prefill, and calls whose answer is being read.
        waiting = min(self._counters.waiting, self._counters.requests - running)
        ahead = waiting - (self._most_running - running)
        return Outlook(max(ahead, 0) * self._each, self._most_steps * self._engine.usual_step)

    def come_again(self, seconds: float | None) -> float:
        """Seconds after which the call that is refused now is worth another try.

        Args:
            seconds: until its deadline; None: it has none. Who has less time than it would have to
                wait is not expected again.
        """
        if self._engine is None or self._ended < _ENOUGH:
            return 0.0
        # Every front end sees its share of the refused, and of the ends.
        each = self._each * self._counters.count
        now = self._now()
        gone = (now - self._refused_at) / each if each else self._refused
        self._refused, self._refused_at = max(self._refused - gone, 0.0), now
        after = self._refused * each
        if seconds is None or after < seconds:
            self._refused += 1
        return after

    @property
    def _each(self) -> float:
        """Seconds from the end of one call to that of the next, while all rows are taken."""
        assert self._engine is not None
        return self._steps * self._engine.usual_step / max(self._most_running, 1)

    @property
    def _most_running(self) -> int:
        """Calls that can run at once."""
        assert self._engine is not None
        # While sequences wait in the engine, as many run as can; else the other rows are free.
        load = self._engine.load
        return load.running if load.waiting else self._rows

    @property
    def _most_steps(self) -> float:
        """Steps that hardly any call exceeds."""
        return self._steps + 2 * self._deviation
