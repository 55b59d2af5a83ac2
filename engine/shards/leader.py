"""The leader's end of the plan streams: rank 0 gathers the others and sends them every step.

Each follower has the stream that it opened, and a queue of frames for it. The step loop only puts a
frame into each queue; gRPC's threads do the rest.

    gather -> form -> come_up -> send_plan ...

Until `form` a follower may come and go. From then on the group needs every one of them: a stream
that ends, or a follower that is silent, is reported once to `on_lost`, on some thread.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc

from tokenpod.core.errors import EngineError
from tokenpod.core.group_messages import Drain
from tokenpod.core.placement import Placement
from tokenpod.core.plan import StepPlan
from tokenpod.core.rank_reads import RankRead
from tokenpod.core.silence import Silence
from tokenpod.engine.shards.facts import PROTOCOL, difference
from tokenpod.engine.shards.rival import find_rival
from tokenpod.engine.shards.transport import SERVER_OPTIONS, SERVICE, server_credentials
from tokenpod.engine.steps.integers import numbers_of
from tokenpod_client.protos.tokenpod.shard.v1 import shard_pb2 as pb

#: Threads for streams that are refused, besides one per follower.
_SPARE_THREADS = 4
#: For a rank that has connected to introduce itself.
_HELLO_SECONDS = 5.0
#: Between two looks for another leader.
_LOOK_SECONDS = 2.0


@dataclass(eq=False)
class _Follower:
    """One follower's stream. `outbox` ends with None."""

    rank: int
    outbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)
    #: KV slots, once it is ready.
    slots: int | None = None
    #: The last plan that it has begun.
    begun: int = 0


class PlanServer:
    """Serves the plans of one group's life.

    Args:
        placement: rank 0's.
        facts: what every follower must agree on.
        on_lost: called once with the reason why the group can't go on, and whether trying again
            is of no use.
        on_drain: called when a follower's pod asks to drain.

    Raises:
        EngineError: the address can't be bound, or a file of `tls` can't be read.
    """

    def __init__(
        self,
        placement: Placement,
        facts: Mapping[str, str],
        *,
        on_lost: Callable[[str, bool], None],
        on_drain: Callable[[Drain], None],
    ) -> None:
        #: Names this life of the group.
        self.generation = secrets.token_hex(8)
        self.silence = Silence[int]()
        self._placement = placement
        self._facts = facts
        self._on_lost = on_lost
        self._on_drain = on_drain
        self._followers: dict[int, _Follower] = {}
        self._formed = False
        self._over = False
        self._plans = 0
        #: Why a rank that came was not let in, by rank; for the operator.
        self._refused: dict[int, str] = {}
        #: What followers have answered to `read_adapter`.
        self.reads: SimpleQueue[RankRead] = SimpleQueue()
        #: Another leader in our place.
        self._rival: str | None = None
        #: Guards what is above, and is notified when it changes.
        self._changed = threading.Condition()
        self._server = self._listen()

    # -- the group's life ----------------------------------------------------------------------

    def gather(self, on_waiting: Callable[[str], None]) -> None:
        """Wait until every follower is there; `on_waiting` is called with what is missing."""
        last = ""
        if self._placement.found_at:
            threading.Thread(target=self._look_for_rivals, name="rivals", daemon=True).start()
        with self._changed:
            while text := self._missing():
                if text != last:
                    on_waiting(last := text)
                self._changed.wait()

    def form(self, port: int) -> None:
        """All ranks start collectives at `port` of the leader's host; none may leave any more."""
        with self._changed:
            self._formed = True
        self._send(pb.FollowResponse(form=pb.Form(port=port)))

    def come_up(self, slots: int) -> None:
        """Wait until every follower is warm, and let all of them report that they serve.

        Raises:
            EngineError: their pools have not `slots` KV slots each, as the leader's has.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: all(s.slots is not None for s in self._followers.values())
            )
            for rank, follower in sorted(self._followers.items()):
                if follower.slots != slots:
                    raise EngineError(
                        f"rank {rank} has {follower.slots} KV slots, rank 0 has {slots}"
                    )
        self._send(pb.FollowResponse(serving=pb.Serving()))

    def send_plan(self, plan: StepPlan) -> None:
        """The next step, for every follower."""
        self._plans += 1
        columns = plan.to_bytes(numbers_of)
        self._send(pb.FollowResponse(plan=pb.Plan(number=self._plans, columns=columns)))

    def send_capture(self) -> None:
        """Have all capture one more size of steps, behind the plans sent so far."""
        self._send(pb.FollowResponse(capture=pb.Capture()))

    @property
    def count(self) -> int:
        """Followers."""
        return self._placement.world - 1

    def read_adapter(self, number: int, name: str, path: str) -> None:
        """Ask all to read an adapter; each answers in `reads`."""
        wanted = pb.ReadAdapter(number=number, name=name, path=path)
        self._send(pb.FollowResponse(read_adapter=wanted))

    def drop_adapter(self, number: int) -> None:
        """Ask all to forget an adapter, behind the plans sent so far."""
        self._send(pb.FollowResponse(drop_adapter=pb.DropAdapter(number=number)))

    def send_drain(self, drain: Drain) -> None:
        """Tell a follower's front end that this pod has drained; nothing if it has left."""
        message = pb.FollowResponse(drain=pb.Drain())
        with self._changed:
            follower = self._followers.get(drain.rank)
        if follower is not None:
            follower.outbox.put(message.SerializeToString())

    def beat(self) -> None:
        """One heartbeat for every follower."""
        self._send(pb.FollowResponse(heartbeat=pb.Heartbeat()))

    def lag(self) -> int:
        """Plans that the slowest follower has yet to begin."""
        with self._changed:
            return max(
                (self._plans - follower.begun for follower in self._followers.values()), default=0
            )

    def miss(self, rank: int, seconds: float) -> None:
        """A follower has been silent for so long."""
        with self._changed:
            follower = self._followers.get(rank)
        if follower is not None:
            self._left(follower, f"it has not been heard for {seconds:g} s")

    def lose(self, reason: str, *, fault: bool = False) -> None:
        """The group is over; only the first call counts."""
        with self._changed:
            if self._over:
                return
            self._over = True
        self._on_lost(reason, fault)

    def close(self, farewell: str, *, fault: bool = False) -> None:
        """Tell the followers why, and end their streams."""
        with self._changed:
            self._over = True
        self._send(pb.FollowResponse(farewell=pb.Farewell(reason=farewell, fault=fault)))
        with self._changed:
            for follower in self._followers.values():
                follower.outbox.put(None)
        self._server.stop(0.5).wait(1.0)

    # -- streams -------------------------------------------------------------------------------

    def _listen(self) -> grpc.Server:
        placement = self._placement
        server = grpc.server(
            ThreadPoolExecutor(placement.world + _SPARE_THREADS, thread_name_prefix="plans"),
            options=SERVER_OPTIONS,
        )
        # A frame is encoded once for all followers: what is sent are bytes.
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._follow, request_deserializer=pb.FollowRequest.FromString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Follow": handler}),)
        )
        try:
            if placement.tls is None:
                server.add_insecure_port(placement.plans)
            else:
                server.add_secure_port(placement.plans, server_credentials(placement.tls))
        except RuntimeError as error:
            doubt = " Or are the files of --shard-tls-cert wrong?" if placement.tls else ""
            raise EngineError(
                f"the leader cannot listen on {placement.plans} (--shard-port): is there another?"
                f"{doubt}"
            ) from error
        server.start()
        return server

    def _follow(
        self, requests: Iterator[pb.FollowRequest], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        # Streams without a first message are closed, because each holds a thread.
        impatience = threading.Timer(_HELLO_SECONDS, context.cancel)
        impatience.start()
        hello = next(requests, pb.FollowRequest()).hello
        impatience.cancel()
        follower = self._admit(hello)
        if isinstance(follower, pb.FollowResponse):
            yield follower.SerializeToString()
            return
        # Called at once if the stream has ended already.
        if not context.add_callback(lambda: self._left(follower)):
            self._left(follower)
            return
        threading.Thread(target=self._read, args=(follower, requests), daemon=True).start()
        while (frame := follower.outbox.get()) is not None:
            yield frame

    def _admit(self, hello: pb.Hello) -> _Follower | pb.FollowResponse:
        """The follower, or the message that refuses it."""
        accepted = pb.Accepted(
            generation=self.generation, leader_address=self._placement.leader_address
        )
        answer = pb.FollowResponse(accepted=accepted)
        if hello.rank == 0 and hello.generation == self.generation:
            return answer
        with self._changed:
            refusal = self._refusal(hello)
            if refusal is None:
                follower = self._followers[hello.rank] = _Follower(hello.rank)
                follower.outbox.put(answer.SerializeToString())
                self._refused.pop(hello.rank, None)
                self.silence.watch(hello.rank)
            else:
                self._refused[hello.rank] = refusal
            self._changed.notify_all()
        if refusal is not None:
            return pb.FollowResponse(refused=pb.Refused(reason=refusal))
        return follower

    def _refusal(self, hello: pb.Hello) -> str | None:
        placement, rank = self._placement, hello.rank
        if not secrets.compare_digest(hello.secret, placement.secret):
            return "it belongs to another pod"
        if hello.protocol != PROTOCOL:
            return f"it speaks version {hello.protocol} of the protocol, the leader {PROTOCOL}"
        if rank == 0:
            return "there are two leaders: another rank 0 (--node-rank 0) looks for this one"
        if hello.world != placement.world:
            return f"it is one of {hello.world} ranks, the leader one of {placement.world}"
        if rank >= placement.world:
            return f"there is no rank {rank} in a group of {placement.world}"
        if (differs := difference(self._facts, hello.facts, rank)) is not None:
            return differs
        if rank in self._followers:
            return f"rank {rank} is here already"
        return None

    def _read(self, follower: _Follower, requests: Iterator[pb.FollowRequest]) -> None:
        try:
            for request in requests:
                self.silence.heard(follower.rank)
                self._take(follower, request)
        except grpc.RpcError:
            pass  # the stream's callback reports its end
        except Exception as error:
            self.lose(f"rank {follower.rank} said what the leader can't read: {error}")

    def _look_for_rivals(self) -> None:
        place = self._placement
        while not self._formed and not self._over:
            rival = find_rival(place.found_at, self.generation, place.tls)
            with self._changed:
                # One that has given up meanwhile is still why this one waits.
                self._rival = rival or self._rival
                self._changed.notify_all()
            time.sleep(_LOOK_SECONDS)

    def _take(self, follower: _Follower, request: Any) -> None:
        match request.WhichOneof("message"):
            case "heartbeat":
                follower.begun = request.heartbeat.plan
            case "ready":
                with self._changed:
                    follower.slots = request.ready.slots
                    self._changed.notify_all()
            case "adapter_read":
                read = request.adapter_read
                found = RankRead(follower.rank, read.number, read.digest, read.problem)
                self.reads.put(found)
            case "drain":
                self._on_drain(Drain(follower.rank))
            case "farewell":
                self._left(follower, request.farewell.reason, fault=request.farewell.fault)

    def _left(
        self, follower: _Follower, reason: str = "its connection ended", *, fault: bool = False
    ) -> None:
        with self._changed:
            if self._followers.get(follower.rank) is not follower:
                return
            del self._followers[follower.rank]
            self.silence.forget(follower.rank)
            follower.outbox.put(None)
            formed = self._formed
            self._changed.notify_all()
        if formed:
            verb = "failed" if fault else "was lost"
            self.lose(f"rank {follower.rank} {verb}: {reason}", fault=fault)

    def _send(self, message: pb.FollowResponse) -> None:
        frame = message.SerializeToString()
        with self._changed:
            for follower in self._followers.values():
                follower.outbox.put(frame)

    def _missing(self) -> str:
        world = self._placement.world
        absent = [rank for rank in range(1, world) if rank not in self._followers]
        if not absent:
            return ""
        ranks = ", ".join(map(str, absent))
        text = f"waiting for rank {ranks} of {world} at {self._placement.plans}"
        notes = [self._rival] if self._rival else []
        notes += [f"rank {rank} was refused: {why}" for rank, why in sorted(self._refused.items())]
        return "; ".join([text, *notes])
