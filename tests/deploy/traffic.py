"""A Service, and clients that never stop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from deploy.helm import Object
from deploy.kubelet import Pod
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub


class ClusterIp:
    """A Service's address: each new connection goes to one of the ready pods that it selects.

    As on a node, news of a pod takes a while (`lag` seconds) to get here, and connections that
    are open stay where they are.
    """

    def __init__(self, service: Object, pods: Callable[[], Iterable[Pod]], lag: float) -> None:
        (port,) = service["spec"]["ports"]
        self._selector = service["spec"]["selector"]
        self._target = port["targetPort"]
        self._pods = pods
        self._lag = lag
        self._views: list[tuple[float, list[Pod]]] = [(0.0, [])]
        self._turn = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self.address = ""

    async def __aenter__(self) -> ClusterIp:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        self._tasks.append(asyncio.create_task(self._look()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    def endpoints(self) -> list[Pod]:
        """What this node thinks is there."""
        then = time.monotonic() - self._lag
        return next(pods for at, pods in reversed(self._views) if at <= then)

    async def _look(self) -> None:
        while True:
            chosen = [
                pod
                for pod in self._pods()
                if pod.ready and not pod.deleted and self._selector.items() <= pod.labels.items()
            ]
            if chosen != self._views[-1][1]:
                self._views.append((time.monotonic(), chosen))
            await asyncio.sleep(0.02)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            if not (pods := self.endpoints()):
                return
            self._turn += 1
            pod = pods[self._turn % len(pods)]
            there, back = await asyncio.open_connection(pod.address, _port(pod, self._target))
            with contextlib.closing(back):
                ways = {
                    asyncio.create_task(_copy(reader, back)),
                    asyncio.create_task(_copy(there, writer)),
                }
                self._tasks += ways
                await asyncio.wait(ways, return_when="FIRST_COMPLETED")
                for way in ways:
                    way.cancel()


def _port(pod: Pod, name: str) -> int:
    containers = pod.template["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for each in containers for p in each["ports"]}
    return int(ports[name])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()


@dataclass
class Traffic:
    """Clients that generate all the time, and what has become of their requests.

    Args:
        address, service: where they go, and what its certificate calls it.
        credentials: for TLS; plaintext without.
        metadata: sent with every call.
    """

    address: str
    service: str
    credentials: grpc.ChannelCredentials | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    finished: int = 0
    #: Not accepted, with a hint when to come again.
    refused: int = 0
    #: Not accepted, and without a hint: the connection was lost.
    missed: int = 0
    #: Accepted and then broken off, or not accepted for no good reason.
    failed: list[str] = field(default_factory=list)
    #: Seconds from the first try to the end, of the slowest request.
    slowest: float = 0.0

    async def generate(self, *, tokens: int, every: float) -> None:
        """One client with one channel, until cancelled."""
        request = pb.GenerateRequest(
            text="def add(a, b):",
            stopping=pb.StoppingOptions(max_new_tokens=tokens, ignore_eos=True),
        )
        options: list[tuple[str, Any]] = [
            ("grpc.ssl_target_name_override", self.service),
            # Else all channels of a process share one connection, and so one pod.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        async with self._channel(options) as channel:
            stub: Any = GenerationServiceStub(channel)
            while True:
                began = time.monotonic()
                while not await self._tried(stub, request, tokens):  # noqa: ASYNC110 (tries again)
                    await asyncio.sleep(0.2)
                self.slowest = max(self.slowest, time.monotonic() - began)
                await asyncio.sleep(every)

    def _channel(self, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, self.credentials, options)

    async def _tried(self, stub: Any, request: Any, tokens: int) -> bool:
        """Whether it came to its end; if not, it may be tried again."""
        accepted, count = False, 0
        try:
            call = stub.Generate(request, timeout=120, wait_for_ready=True, metadata=self.metadata)
            async for event in call:
                accepted = True
                if event.WhichOneof("event") == "finished":
                    count = event.finished.generated_token_count
        except grpc.aio.AioRpcError as error:
            self._note(error, accepted)
            return False
        if count != tokens:
            self.failed.append(f"{count} tokens of {tokens}")
        self.finished += 1
        return True

    def _note(self, error: grpc.aio.AioRpcError, accepted: bool) -> None:
        hint = "grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ())
        if accepted or error.code() is not grpc.StatusCode.UNAVAILABLE:
            self.failed.append(f"{error.code().name} ({accepted=}): {error.details()}")
        elif hint:
            self.refused += 1
        else:
            self.missed += 1
