"""The bounded queue: what is taken in, and what is refused at once.

Refusing is cheap and happens before anything is tokenised or sent to the engine, so that ten times
the load that can be served costs the tenth that is served almost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenpod.service.errors import ResourceExhausted, Unavailable
from tokenpod.service.house import House

#: Seconds after which a refused client should try again.
RETRY_SECONDS = 1.0
#: What those are told who come while the server stops.
DRAINING = "the server is draining"


class Admission:
    """Counts the requests in the house, those of all front-end processes together.

    Limits hold for the pod, not for a process: where a connection lands is chance. Two processes
    that count at the same instant may let one too many in.

    Args:
        max_requests: `Generate` calls at once, running and waiting together.
        max_queue_tokens: prompt tokens that may wait for their computation; to be set before
            anything is taken in, if it depends on the engine.
        house: where the counts are; None: this process is alone.
    """

    def __init__(
        self, *, max_requests: int, max_queue_tokens: int = 0, house: House | None = None
    ) -> None:
        self.max_requests = max_requests
        self.max_queue_tokens = max_queue_tokens
        self.house = house or House.create(1)
        #: Why nothing is taken in: the server is starting or draining.
        self.closed: str | None = "the server is starting: the model is not loaded yet"

    @property
    def requests(self) -> int:
        """Calls in the house."""
        return self.house.requests

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the calls that have not started."""
        return self.house.waiting_tokens

    def drain(self) -> None:
        """Take in nothing more, in any process."""
        self.closed = DRAINING
        self.house.close()

    def check_open(self) -> None:
        """Raise Unavailable while the server takes no new work."""
        if self.house.closed:
            self.closed = DRAINING
        if self.closed:
            raise Unavailable(self.closed, retry_after=RETRY_SECONDS)

    @contextmanager
    def enter(self) -> Iterator[Place]:
        """Hold a place for one call; raises Unavailable or ResourceExhausted at once."""
        self.check_open()
        if (requests := self.requests) >= self.max_requests:
            raise ResourceExhausted(
                f"{requests} requests are running or waiting; this server takes at most"
                f" {self.max_requests} (--max-concurrent-requests)",
                limit="max_concurrent_requests",
                retry_after=RETRY_SECONDS,
            )
        self.house.add(requests=1)
        place = Place(self)
        try:
            yield place
        finally:
            place.leave_queue()
            self.house.add(requests=-1)


class Place:
    """One call's place in the house."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._tokens = 0

    def queue(self, prompt_tokens: int) -> None:
        """Join the queue; raises ResourceExhausted if it would overflow.

        An empty queue takes any prompt that the other limits allow.
        """
        waiting, most = self._admission.waiting_tokens, self._admission.max_queue_tokens
        if waiting and waiting + prompt_tokens > most:
            raise ResourceExhausted(
                f"{waiting} prompt tokens are waiting; with the {prompt_tokens} of this request"
                f" the queue would exceed {most} (--max-queue-tokens)",
                limit="max_queue_tokens",
                retry_after=RETRY_SECONDS,
            )
        self._tokens = prompt_tokens
        self._admission.house.add(waiting_tokens=prompt_tokens)

    def leave_queue(self) -> None:
        """The prompt has been computed, or the call is over."""
        self._admission.house.add(waiting_tokens=-self._tokens)
        self._tokens = 0
