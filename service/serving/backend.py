"""What the handlers of every dialect call, and what is asked before a call's message is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenpod.core.messages import Ready
from tokenpod.core.task import Task
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.memory_budget import MemoryBudget
from tokenpod.service.calls.errors import RETRY_SECONDS, FailedPrecondition, Unavailable
from tokenpod.service.pod.processes import PodProcesses
from tokenpod.service.rpc.methods import Gate, MethodTable
from tokenpod.service.serving.generate import GenerateService
from tokenpod.service.serving.reading import ReadingService
from tokenpod.service.serving.shard import ShardService


class Backend:
    """The services of a pod: streams of text, routers' batches, and what a pod says of itself.

    Args:
        table: the rpcs.
        admission: refuses calls while the server starts or drains.
        generate: streams of text, and tokenising.
        healthy: whether the engine moves.
        processes: of the pod, where operators may look into them by rpcs.
        relays: this is a further front end: the first one checks what is relayed to it.
    """

    def __init__(
        self,
        table: MethodTable,
        admission: Admission,
        generate: GenerateService,
        healthy: Callable[[], bool],
        processes: PodProcesses | None = None,
        *,
        relays: bool = False,
    ) -> None:
        self.table = table
        self.admission = admission
        self.generate = generate
        self.reading = ReadingService(admission, generate)
        self.healthy = healthy
        self.processes = processes
        self.model_id = ""
        #: Addresses of the shards that a router is to call.
        self.urls: Sequence[str] = ()
        #: Where the pod that generates is, as host:port; "": it is this one.
        self.leader_address = ""
        self._relays = relays
        self._ready: Ready | None = None
        self._shard: ShardService | None = None

    def start(self, ready: Ready, shard: ShardService, *, model_id: str, url: str) -> None:
        """The model is ready, and routers reach this pod at `url`."""
        self.model_id, self.leader_address, self.urls = model_id, "", [url]
        self._ready, self._shard = ready, shard

    def follow(self, ready: Ready, *, model_id: str, leader_address: str) -> None:
        """The model is ready, and this pod follows the one at `leader_address`."""
        self.model_id, self.leader_address, self.urls = model_id, leader_address, [leader_address]
        self._ready, self._shard = ready, None

    @property
    def task(self) -> Task | None:
        """What the model is for; None: it is not ready yet."""
        return self.generate.task

    @property
    def ready(self) -> Ready:
        """What the engine said of the model. Raises Unavailable until it is ready."""
        if self._ready is None:
            self.admission.check_open()
            raise Unavailable("the model is not loaded yet", retry_after=RETRY_SECONDS)
        return self._ready

    @property
    def shard(self) -> ShardService:
        """The batches of routers, of a pod that leads. Raises Unavailable until it is ready."""
        _ = self.ready
        assert self._shard is not None, "the gate refuses such calls on a pod that follows"
        return self._shard

    def check(self, method: str, remaining: float | None = None) -> MemoryBudget | None:
        """Raise what a call of `method` would be refused with, whatever its message says.

        Args:
            method: its full name.
            remaining: seconds until the call's deadline; None: it has none.

        Returns:
            Where the bytes of a message that passes Gate.QUEUE or ROW are to be counted; None: it
            needs none to speak of.

        Raises:
            Unavailable: the server starts or drains, or the engine makes no progress.
            ResourceExhausted: the queue or the front ends' memory is full, or the call would end
                after its deadline.
            FailedPrecondition: this pod follows, and the leader alone answers such calls; or the
                model is made for another rpc, which is named.
        """
        row = self.table.rows[method]
        queues = row.gate in (Gate.QUEUE, Gate.ROW)
        if self._relays and row.relayed:
            return None
        if row.gate is Gate.READY:
            _ = self.ready
        elif queues:
            self.admission.check_room(remaining if row.gate is Gate.ROW else None)
        if self.leader_address and not row.on_followers:
            raise FailedPrecondition(f"this pod follows: ask the leader at {self.leader_address}")
        if row.task is not None and self.task not in (row.task, None):
            right = next(each for each in self.table if each.task is self.task)
            raise FailedPrecondition(
                f"this server's model is made to {self.task.value}: call {right.name[1:]}"
            )
        if not queues:
            return None
        self.admission.memory.check()
        return self.admission.memory
