"""A rank as a member of its group: its connections to the other ranks and to its pod's front end.

Whatever the main thread does (load, wait in a collective), a member's own threads send heartbeats,
receive, and end the process with one line that says why once the group can't go on. A process never
outlives its group: new processes form the next one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from tokenpod.core.errors import EngineError, RankLost
from tokenpod.core.group_messages import Drain, Joined, Pulse, Waiting
from tokenpod.core.messages import Broken, EngineOptions
from tokenpod.core.plan import StepPlan
from tokenpod.core.silence import (
    BEAT_SECONDS,
    LOADING_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
)
from tokenpod.engine.shards.control_stream import ControlStream
from tokenpod.engine.shards.facts import facts_of
from tokenpod.engine.shards.follower import FollowerAdapters, PlanStream
from tokenpod.engine.shards.leader import PlanServer
from tokenpod.models.checkpoints.errors import ModelError

if TYPE_CHECKING:
    # It brings torch, whose import takes seconds in which a member is to be heard already.
    from tokenpod.engine.steps.executor import CapturesLater, Executor, Launched

#: Seconds for the last messages to leave the process.
_LAST_MESSAGES_SECONDS = 0.1
#: Seconds that the step loop has to see that its link is closed.
_LEAVE_SECONDS = 1.0
#: A rank that dies breaks collectives, whose errors do not say which rank it was. After so many
#: seconds its death is known from its stream, whose error does.
_VERDICT_SECONDS = 1.0


class Member:
    """One rank. Make it before anything that takes long: it sends heartbeats from then on.

    Args:
        options: with a placement.

    Raises:
        EngineError: the leader's address can't be bound, or a TLS file can't be read.
    """

    def __init__(self, options: EngineOptions) -> None:
        assert options.placement is not None
        self.placement = placement = options.placement
        #: Port of the rendezvous for collectives, once `join` has returned.
        self.rendezvous_port = 0
        self._serving = False
        self._control = ControlStream(
            socket.socket(fileno=placement.control_fd),
            on_drain=self._send_drain,
            on_over=self._give_up,
            on_closed=self._hung_up,
        )
        self._leader: PlanServer | None = None
        self._follower: PlanStream | None = None
        facts, carry = facts_of(options), self._control.send
        if placement.rank == 0:
            self._leader = PlanServer(placement, facts, on_lost=self._lost, on_drain=carry)
        else:
            self._follower = PlanStream(placement, facts, on_lost=self._lost, on_drain=carry)
        self._control.listen()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self._leader is not None

    # -- the main thread's -----------------------------------------------------------------------

    def join(self) -> None:
        """Wait for the other ranks, without a time limit of its own."""
        if self._leader is not None:
            self._leader.gather(self.wait_for)
            self.rendezvous_port = self.placement.rendezvous_port or _free_port(
                self.placement.rendezvous
            )
            self._leader.form(self.rendezvous_port)
        else:
            assert self._follower is not None
            leader_address, self.rendezvous_port = self._follower.join(self.wait_for)
            self._control.send(Joined(leader_address))

    def wait_for(self, reason: str) -> None:
        """Report to the operator what this rank waits for."""
        self._control.send(Waiting(reason))

    def come_up(self, slots: int) -> None:
        """This rank is warm: wait until all are. Raises EngineError."""
        self._peers.come_up(slots)
        self._peers.silence.forgive()
        self._serving = True

    def leading(self, executor: Executor, captures: CapturesLater | None) -> Leading:
        """What launches and captures on all ranks, at this one `executor` and `captures`."""
        assert self._leader is not None
        return Leading(self._leader, executor, captures)

    @property
    def followers(self) -> PlanServer:
        """What the leader tells of adapters, and hears."""
        assert self._leader is not None
        return self._leader

    def plans(self, adapters: FollowerAdapters) -> Iterator[StepPlan | None]:
        """The leader's plans, in order; None: it captures a size of steps.

        Raises EngineError at a gap, RankLost at the end.
        """
        assert self._follower is not None
        return self._follower.plans(adapters)

    def fail(self, error: BaseException, line: str) -> NoReturn:
        """The main thread can't go on: report it, unless a lost rank is known; end the process.

        Args:
            error: what stopped it.
            line: the same for the operator.
        """
        time.sleep(_VERDICT_SECONDS)
        expected = isinstance(error, EngineError | ModelError)
        if not expected:
            traceback.print_exception(error)
        peer = isinstance(error, RankLost)
        self._control.send(Broken(line, peer=peer))
        self._end(line, 1, fault=expected and not peer)

    def leave(self) -> NoReturn:
        """End the process, because the pod stops."""
        self._end("its pod stops" if self._follower else "the leader stops", 0)

    # -- other threads' ----------------------------------------------------------------------------

    @property
    def _peers(self) -> PlanServer | PlanStream:
        peers = self._leader or self._follower
        assert peers is not None
        return peers

    def _beat(self) -> None:
        while True:
            self._control.send(Pulse())
            self._peers.beat()
            patience = PATIENCE_SECONDS if self._serving else LOADING_PATIENCE_SECONDS
            for rank in self._peers.silence.tick(patience):
                self._peers.miss(rank, patience)
            time.sleep(BEAT_SECONDS)

    def _send_drain(self, drain: Drain) -> None:
        self._peers.send_drain(drain)

    def _give_up(self, reason: str) -> None:
        self._peers.lose(reason)

    def _lost(self, reason: str, fault: bool) -> None:
        self._control.send(Broken(reason, peer=not fault))
        self._end(reason, 1, fault=fault)

    def _hung_up(self) -> None:
        time.sleep(_LEAVE_SECONDS)
        self.leave()

    def _end(self, farewell: str, status: int, *, fault: bool = False) -> NoReturn:
        self._peers.close(farewell, fault=fault)
        time.sleep(_LAST_MESSAGES_SECONDS)
        # Not sys.exit: other threads are in collectives that never end.
        os._exit(status)


class Leading:
    """Launches steps that all ranks take, and captures what all capture.

    Followers get the message first. Devices add up over ranks in steps and in a capture's first
    run, so all ranks run both in one order.
    """

    def __init__(self, server: PlanServer, local: Executor, captures: CapturesLater | None) -> None:
        self._server, self._local, self._captures = server, local, captures

    def launch(self, plan: StepPlan) -> Launched:
        """Send it to the followers, then start this rank's part."""
        self._server.send_plan(plan)
        return self._local.launch(plan)

    def capture_next(self) -> bool:
        """See `CapturesLater`."""
        assert self._captures is not None, "this rank has nothing to capture"
        self._server.send_capture()
        return self._captures.capture_next()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])
