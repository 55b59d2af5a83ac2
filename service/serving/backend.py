"""What the handlers of every dialect call: the services of a pod."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenpod.core.messages import Ready
from tokenpod.core.task import Task
from tokenpod.service.admission.admission import Admission
from tokenpod.service.pod.processes import PodProcesses
from tokenpod.service.rpc.methods import MethodTable
from tokenpod.service.rpc.services import Services
from tokenpod.service.serving.generate import GenerateService
from tokenpod.service.serving.reading import ReadingService
from tokenpod.service.serving.shard import ShardService


class Backend(Services):
    """Streams of text, routers' batches, and what a pod says of itself.

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
        super().__init__(table, admission, relays=relays)
        self.generate = generate
        self.reading = ReadingService(admission, generate)
        self.healthy = healthy
        self.processes = processes
        self.model_id = ""
        #: Addresses of the shards that a router is to call.
        self.urls: Sequence[str] = ()
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
    def shard(self) -> ShardService:
        """The batches of routers, of a pod that leads. Raises Unavailable until it is ready."""
        _ = self.ready
        assert self._shard is not None, "the gate refuses such calls on a pod that follows"
        return self._shard
