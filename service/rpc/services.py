"""What the handlers of a server are given, and whether a call may reach one."""

from __future__ import annotations

import functools
from typing import Any

import grpc

from tokenpod.core.messages import Ready
from tokenpod.core.task import Task
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.memory_budget import MemoryBudget
from tokenpod.service.calls.errors import RETRY_SECONDS, FailedPrecondition, Unavailable
from tokenpod.service.rpc.methods import Gate, MethodTable

#: How a handler is made, by whether requests and answers are streams.
_MAKE = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Services:
    """The rpcs of a table, and what is asked before the message of a call is read.

    Args:
        table: the rpcs.
        admission: refuses calls while the server starts or drains.
        relays: this is a further front end: the first one checks what is relayed to it.
    """

    def __init__(self, table: MethodTable, admission: Admission, *, relays: bool = False) -> None:
        self.table = table
        self.admission = admission
        #: Where the pod that generates is, as host:port; "": it is this one.
        self.leader_address = ""
        self._relays = relays
        self._ready: Ready | None = None

    @property
    def task(self) -> Task | None:
        """What the model is for; None: it is not ready yet."""
        return None if self._ready is None else self._ready.task

    @property
    def ready(self) -> Ready:
        """What the engine said of the model. Raises Unavailable until it is ready."""
        if self._ready is None:
            self.admission.check_open()
            raise Unavailable("the model is not loaded yet", retry_after=RETRY_SECONDS)
        return self._ready

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
        row = self.table[method]
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


def add_methods(services: Services, server: grpc.aio.Server) -> None:
    """Serve every rpc of the table that is not grpcio's own."""
    methods: dict[str, dict[str, Any]] = {}
    for row in services.table:
        if row.serve is None:
            continue
        make = _MAKE[row.takes_stream, row.streams]
        methods.setdefault(row.service, {})[row.name.rpartition("/")[2]] = make(
            functools.partial(row.serve, services),
            request_deserializer=row.request.FromString,
            response_serializer=row.response.SerializeToString,
        )
    handlers = [grpc.method_handlers_generic_handler(*each) for each in methods.items()]
    server.add_generic_rpc_handlers(tuple(handlers))
