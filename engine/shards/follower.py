"""A follower's end of its plan stream.

    join -> come_up -> plans

Until the leader says `Form` nothing is lost with a stream: `join` tries again, and says why. From
then on its end, or the leader's silence, is reported once to `on_lost`, on some thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import grpc

from tokenpod.core.errors import EngineError, RankLost
from tokenpod.core.group_messages import Drain
from tokenpod.core.placement import Placement
from tokenpod.core.plan import StepPlan
from tokenpod.core.rank_reads import RankRead
from tokenpod.core.silence import Silence
from tokenpod.engine.shards.facts import PROTOCOL
from tokenpod.engine.shards.transport import METHOD, channel
from tokenpod_client.protos.tokenpod.shard.v1 import shard_pb2 as pb

#: Seconds to wait for the leader's first answer, and before the next attempt.
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 0.3

LEADER = 0

#: What comes once a group serves.
_PLANS = (pb.Plan, pb.Capture, pb.ReadAdapter, pb.DropAdapter)


class FollowerAdapters(Protocol):
    """A follower's adapters, as its leader says."""

    def read(self, number: int, name: str, path: str, tell: Callable[[RankRead], None]) -> None:
        """Read one, and tell of it; returns before that."""
        ...

    def drop(self, number: int) -> None:
        """Forget one."""
        ...


class PlanStream:
    """One rank's stream from the leader.

    Args:
        placement: this rank's.
        facts: what the leader must agree on.
        on_lost: called once with the reason why the group can't go on, and whether trying again
            is of no use.
        on_drain: called once the leader's pod has drained, as this one's asked.
    """

    def __init__(
        self,
        placement: Placement,
        facts: Mapping[str, str],
        *,
        on_lost: Callable[[str, bool], None],
        on_drain: Callable[[Drain], None],
    ) -> None:
        self.silence = Silence[int]()
        self._placement = placement
        self._hello = pb.Hello(
            protocol=PROTOCOL,
            rank=placement.rank,
            world=placement.world,
            facts=dict(facts),
            secret=placement.secret,
        )
        self._on_lost = on_lost
        self._on_drain = on_drain
        self._lock = threading.Lock()
        self._over = False
        #: Of the attempt under way: what to send, and what has come for the main thread.
        self._outbox: SimpleQueue[pb.FollowRequest | None] = SimpleQueue()
        self._received: SimpleQueue[Any] = SimpleQueue()
        self._formed = False
        self._begun = 0
        #: Why the leader did not let this rank in, last time that it answered.
        self._refused = ""

    # -- the group's life ----------------------------------------------------------------------

    def join(self, on_waiting: Callable[[str], None]) -> tuple[str, int]:
        """Find the leader, and wait until all ranks have.

        Args:
            on_waiting: called with what is waited for.

        Returns:
            Where clients reach the leader's pod, and the port of the ranks' rendezvous.

        Raises:
            RankLost: this end was closed.
        """
        last = ""
        while not self._over:
            outcome = self._attempt()
            if isinstance(outcome, pb.Accepted):
                on_waiting(f"waiting for the other ranks of {self._placement.world}")
                last = ""
                form = self._received.get()
                if isinstance(form, pb.Form):
                    return outcome.leader_address, form.port
                outcome = str(form)
            if outcome != last:
                on_waiting(last := outcome)
            time.sleep(_RETRY_SECONDS)
        raise RankLost("this rank was told to leave while it waited for the others")

    def come_up(self, slots: int) -> None:
        """This rank is warm: wait until all are. Raises RankLost if the stream ends before."""
        self._outbox.put(pb.FollowRequest(ready=pb.Ready(slots=slots)))
        message = self._received.get()
        if not isinstance(message, pb.Serving):
            raise RankLost(f"the group did not come up: {message}")

    def plans(self, adapters: FollowerAdapters) -> Iterator[StepPlan | None]:
        """Every step's plan, in order; None where one more size of steps is to be captured.

        Raises EngineError at a gap, RankLost at the end.

        `adapters` hears of those that come and go, in their order among the plans.
        """
        while isinstance(message := self._received.get(), _PLANS):
            if isinstance(message, pb.ReadAdapter):
                adapters.read(message.number, message.name, message.path, self._tell_read)
                continue
            if isinstance(message, pb.DropAdapter):
                adapters.drop(message.number)
                continue
            if isinstance(message, pb.Capture):
                yield None
                continue
            if message.number != self._begun + 1:
                raise EngineError(f"plan {message.number} came after plan {self._begun}")
            self._begun = message.number
            yield StepPlan.from_bytes(message.columns)
        raise RankLost(f"there are no more plans: {message}")

    def _tell_read(self, read: RankRead) -> None:
        """Any thread may call."""
        told = pb.AdapterRead(number=read.number, digest=read.digest, problem=read.problem)
        self._outbox.put(pb.FollowRequest(adapter_read=told))

    def send_drain(self, drain: Drain) -> None:
        """Ask the leader's front end to drain."""
        self._outbox.put(pb.FollowRequest(drain=pb.Drain()))

    def beat(self) -> None:
        """One heartbeat for the leader."""
        self._outbox.put(pb.FollowRequest(heartbeat=pb.Heartbeat(plan=self._begun)))

    def miss(self, rank: int, seconds: float) -> None:
        """The leader has been silent for so long."""
        self.lose(f"the leader was lost: it has not been heard for {seconds:g} s")

    def lose(self, reason: str, *, fault: bool = False) -> None:
        """The group is over; only the first call counts."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._on_lost(reason, fault)

    def close(self, farewell: str, *, fault: bool = False) -> None:
        """Tell the leader why, and hang up."""
        with self._lock:
            self._over = True
        message = pb.Farewell(reason=farewell, fault=fault)
        self._outbox.put(pb.FollowRequest(farewell=message))
        self._outbox.put(None)

    # -- one stream ----------------------------------------------------------------------------

    def _attempt(self) -> pb.Accepted | str:
        """Call the leader: that we are in, or why not."""
        self._outbox, self._received = SimpleQueue(), SimpleQueue()
        outbox, received = self._outbox, self._received
        outbox.put(pb.FollowRequest(hello=self._hello))
        link = channel(self._placement.plans, self._placement.tls)
        call = link.stream_stream(
            METHOD,
            request_serializer=pb.FollowRequest.SerializeToString,
            response_deserializer=pb.FollowResponse.FromString,
        )(iter(outbox.get, None))
        threading.Thread(
            target=self._read, args=(call, received), name="plans", daemon=True
        ).start()
        try:
            first = received.get(timeout=_ANSWER_SECONDS)
        except Empty:
            first = "it does not answer"
        if isinstance(first, pb.Accepted):
            self.silence.watch(LEADER)
            self._refused = ""
            return first
        outbox.put(None)
        call.cancel()
        link.close()
        where = self._placement.plans
        if isinstance(first, pb.Refused):
            self._refused = (
                f"the leader at {where} refused rank {self._placement.rank}: {first.reason}"
            )
            return self._refused
        waiting = f"waiting for the leader at {where}: {first}"
        # A leader that has given up meanwhile has still said what must be put right.
        return f"{waiting}; before, {self._refused}" if self._refused else waiting

    def _read(self, call: Any, received: SimpleQueue[Any]) -> None:
        """Take what the leader says until the stream ends; then put the reason, a text."""
        reason, farewell = "its connection ended", pb.Farewell()
        try:
            for response in call:
                self.silence.heard(LEADER)
                kind = response.WhichOneof("message")
                if kind == "drain":
                    self._on_drain(Drain(self._placement.rank))
                elif kind == "farewell":
                    farewell = response.farewell
                elif kind != "heartbeat":
                    self._formed = self._formed or kind == "form"
                    received.put(getattr(response, kind))
        except grpc.RpcError as error:
            reason = _reason(error, reason)
        except Exception as error:
            reason = f"it said what this rank can't read: {error}"
        self.silence.forget(LEADER)
        received.put(farewell.reason or reason)
        if self._formed:
            self.lose(farewell.reason or f"the leader was lost: {reason}", fault=farewell.fault)


def _reason(error: grpc.RpcError, otherwise: str) -> str:
    """Why a call failed, in few words; `otherwise` if it had begun well."""
    details = " ".join(str(error.details() or "").split())
    if "Connection refused" in details:
        return "nobody listens there"
    if "resolution" in details:
        return "there is no such name"
    return details.rpartition("last error: ")[2] if "failed to connect" in details else otherwise
