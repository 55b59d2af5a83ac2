"""Build and run the server: listen, load, serve, drain.

The order matters to those who watch from outside:

    bind every address        a taken port fails within a second, before anything is loaded
    answer health             "starting" is NOT_SERVING, not a refused connection
    load and warm up          in the engine's process
    SERVING
    SIGTERM                   NOT_SERVING but still serving for the lame-duck seconds
                              -> new work is refused while streams go on
                              -> what is left after the grace ends with UNAVAILABLE
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from tokenpod.config import ServerSettings
from tokenpod.engine.types import EngineOptions, Ready
from tokenpod.service.admission import Admission
from tokenpod.service.engine_process import ENGINE_COMMAND, EngineLost, EngineProcess
from tokenpod.service.front_ends import FrontEndLost, FrontEnds, PodProgress, Way
from tokenpod.service.generate import GenerateService, Serving, request_limits
from tokenpod.service.health import HealthBoard, serve_health
from tokenpod.service.house import House
from tokenpod.service.interceptors import AuthInterceptor, ErrorInterceptor
from tokenpod.service.listen import (
    StartError,
    bind,
    channel_options,
    check_port,
    credentials,
    free_socket,
    reason,
    remove,
)
from tokenpod.service.logs import configure_logging
from tokenpod.service.model_store import ModelNotFound, resolve_model
from tokenpod.service.progress import LoadingBar
from tokenpod.service.reflection import enable_reflection
from tokenpod.service.relay import serve_relay
from tokenpod.service.servicers import Rpcs, add_servicers
from tokenpod.service.shard import ShardService
from tokenpod.service.telemetry import Telemetry, TelemetrySettings
from tokenpod.service.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("tokenpod")


@dataclass(frozen=True, slots=True)
class Listener:
    """The bound server, and what it can be reached by."""

    server: grpc.aio.Server
    address: str
    shard_url: str


@dataclass(frozen=True, slots=True)
class Server:
    """A pod's front end.

    Args:
        settings: the operator's.
        model_folder: where the model lies.
        engine_command: what runs the engine.
    """

    settings: ServerSettings
    model_folder: Path
    engine_command: Sequence[str] = ENGINE_COMMAND

    async def run(self) -> int:
        """Serve until a signal; the process's exit status. Raises StartError."""
        settings = self.settings
        telemetry = Telemetry.start(
            TelemetrySettings(
                settings.otlp_endpoint, settings.otlp_service_name, settings.otlp_sample_ratio
            )
        )
        house = House.create(settings.resolved_front_ends)
        admission = Admission(
            max_requests=settings.max_concurrent_requests,
            max_queue_tokens=settings.max_queue_tokens,
            house=house,
        )
        board = HealthBoard()
        generate = GenerateService(admission, telemetry)
        rpcs = Rpcs(admission, generate, healthy=board.is_serving)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(telemetry.shutdown)
            stopping = _signals()
            listener = await self._listen(rpcs, telemetry, board, stack)
            engine = await self._start_engine(stack)
            others = await self._start_front_ends(rpcs, board, listener, engine, house, stack)
            loading = asyncio.create_task(self._load(engine, others))
            await asyncio.wait([loading, stopping.task()], return_when="FIRST_COMPLETED")
            if not loading.done():
                loading.cancel()
                return 0
            tokenizer, ready = loading.result()
            self._open(engine, tokenizer, ready, listener, generate, rpcs)
            board.watch(PodProgress(engine.client, house))
            stack.callback(board.close)
            telemetry.watch(lambda: engine.client.load)
            admission.closed = None
            await board.set_serving(True)
            log.info("serving", extra=_summary(settings, ready, listener))
            return await self._serve(listener.server, engine, others, admission, board, stopping)

    async def _listen(
        self, rpcs: Rpcs, telemetry: Telemetry, board: HealthBoard, stack: contextlib.AsyncExitStack
    ) -> Listener:
        settings = self.settings
        interceptors: list[grpc.aio.ServerInterceptor] = [*telemetry.interceptors()]
        interceptors.append(ErrorInterceptor())
        if settings.auth_token_file is not None:
            interceptors.append(AuthInterceptor(settings.auth_token_file))
        shared = settings.resolved_front_ends > 1
        if shared:
            check_port(settings)
        options = channel_options(settings, shared_port=shared)
        server = grpc.aio.server(interceptors=interceptors, options=options)
        names = add_servicers(rpcs, server)
        await board.add_to(server, names)
        enable_reflection([*names, board.service_name], server)
        port = bind(server, settings.address, credentials(settings))
        address = f"{settings.address.rpartition(':')[0]}:{port}"
        shard_url = address
        if (path := settings.socket_path) is not None:
            free_socket(path)
            bind(server, f"unix:{path}", None)
            stack.callback(remove, path)
            shard_url = f"unix://{path}"
        if (health_address := settings.health_address) is not None:
            try:
                health, _ = await serve_health(health_address, board)
            except (OSError, RuntimeError) as error:
                raise StartError(f"cannot listen on {health_address}: {reason(error)}") from error
            stack.push_async_callback(health.stop, None)
        await server.start()
        return Listener(server, address, shard_url)

    async def _start_engine(self, stack: contextlib.AsyncExitStack) -> EngineProcess:
        settings = self.settings
        bar = LoadingBar(settings.model_id)
        stack.callback(bar.close)
        options = EngineOptions(
            model_folder=str(self.model_folder),
            dtype=settings.resolved_dtype,
            device=settings.resolved_device,
            threads=settings.threads,
            max_batch_size=settings.resolved_batch_size,
            max_batch_prefill_tokens=settings.resolved_prefill_tokens,
            max_total_tokens=settings.max_total_tokens,
            max_batch_total_tokens=settings.max_batch_total_tokens,
            memory_fraction=settings.memory_fraction,
            kv_cache_dtype=settings.kv_cache_dtype,
            max_logit_edits=2 * settings.max_logit_bias,
        )
        engine = await EngineProcess.start(
            options, bar.update, self.engine_command, links=settings.resolved_front_ends
        )
        stack.push_async_callback(engine.stop)
        return engine

    async def _start_front_ends(
        self,
        rpcs: Rpcs,
        board: HealthBoard,
        listener: Listener,
        engine: EngineProcess,
        house: House,
        stack: contextlib.AsyncExitStack,
    ) -> FrontEnds:
        """The further front ends, and what they reach this one by; none if one is enough."""
        if house.count == 1:
            return FrontEnds([], house)
        relay, address, secret = await serve_relay(rpcs, board)
        stack.push_async_callback(relay.stop, None)
        others = FrontEnds.start(
            self.settings,
            self.model_folder,
            engine.spare_links,
            house,
            Way(listener.address, address, secret),
        )
        stack.push_async_callback(others.stop)
        return others

    async def _load(self, engine: EngineProcess, others: FrontEnds) -> tuple[Tokenizer, Ready]:
        try:
            async with asyncio.timeout(self.settings.start_timeout):
                tokenizer = await asyncio.to_thread(Tokenizer.load, self.model_folder)
                ready = await engine.ready()
                await others.serving()
                return tokenizer, ready
        except (TokenizerError, EngineLost, FrontEndLost) as error:
            raise StartError(str(error)) from error
        except TimeoutError as error:
            seconds = self.settings.start_timeout
            raise StartError(
                f"the model was not ready within {seconds:g} s (--start-timeout)"
            ) from error

    def _open(
        self,
        engine: EngineProcess,
        tokenizer: Tokenizer,
        ready: Ready,
        listener: Listener,
        generate: GenerateService,
        rpcs: Rpcs,
    ) -> None:
        """Put the services behind the rpcs."""
        limits = request_limits(self.settings, ready)
        serving = Serving(engine.client, tokenizer, limits, self.settings.model_id)
        generate.start(serving)
        shard = ShardService(
            serving,
            urls=[listener.shard_url],
            prefill_tokens=self.settings.resolved_prefill_tokens,
        )
        rpcs.start(ready, shard, model_id=self.settings.model_id)

    async def _serve(
        self,
        server: grpc.aio.Server,
        engine: EngineProcess,
        others: FrontEnds,
        admission: Admission,
        board: HealthBoard,
        stopping: Stopping,
    ) -> int:
        """Until a signal, or until the engine or a front end is lost."""
        lost = engine.client.lost
        futures: set[asyncio.Future[Any]] = {stopping.task(), lost, others.lost}
        await asyncio.wait(futures, return_when="FIRST_COMPLETED")
        if lost.done():
            await board.set_serving(False)
            log.error("the engine was lost", extra={"reason": str(lost.result())})
            # Its clients have been told already; a moment for the answers to leave.
            await server.stop(1.0)
            return 1
        if others.lost.done():
            # Its streams are gone; those of the others may end well before the pod starts anew.
            log.error("a front end was lost", extra={"reason": str(others.lost.result())})
        await self._drain(server, others, admission, board, stopping)
        return 1 if others.lost.done() else 0

    async def _drain(
        self,
        server: grpc.aio.Server,
        others: FrontEnds,
        admission: Admission,
        board: HealthBoard,
        stopping: Stopping,
    ) -> None:
        settings = self.settings
        log.info("draining", extra={"lame_duck_seconds": settings.lame_duck_seconds})
        await board.drain()
        # Endpoints take time to hear of it: until then clients still come, and are served.
        await stopping.sleep(settings.lame_duck_seconds)
        admission.drain()
        deadline = time.monotonic() + settings.graceful_termination_timeout
        while admission.requests and time.monotonic() < deadline and not stopping.urgent:
            await stopping.sleep(0.05)
        # Closes the listener at once, so it comes last.
        grace = 0.0 if stopping.urgent else 0.5
        await asyncio.gather(server.stop(grace), others.stop())
        log.info("stopped", extra={"cut_off": admission.requests})


class Stopping:
    """SIGTERM or SIGINT: the first asks to stop, the second to stop at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[object] | None = None

    def signal(self) -> None:
        """A signal has come."""
        if self._asked.is_set():
            self._urgent.set()
        self._asked.set()

    def task(self) -> asyncio.Task[object]:
        """Done once asked to stop."""
        if self._task is None:
            self._task = asyncio.create_task(self._asked.wait())
        return self._task

    @property
    def urgent(self) -> bool:
        """Whether to stop at once."""
        return self._urgent.is_set()

    async def sleep(self, seconds: float) -> None:
        """Sleep, unless it becomes urgent."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._urgent.wait(), seconds)


def run(settings: ServerSettings, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Run a server in this process; its exit status. One line on standard error if it can't."""
    configure_logging(level=settings.log_level, json_output=settings.json_output)
    try:
        folder = resolve_model(settings.model_id, settings.revision)
        return uvloop.run(Server(settings, folder, engine_command).run())
    except (StartError, ModelNotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _signals() -> Stopping:
    stopping = Stopping()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.signal)
    return stopping


def _summary(settings: ServerSettings, ready: Ready, listener: Listener) -> dict[str, object]:
    return {
        "model_id": settings.model_id,
        "address": listener.address,
        "dtype": ready.dtype,
        "kv_cache_dtype": ready.kv_cache_dtype,
        "device": ready.device_type,
        "front_ends": settings.resolved_front_ends,
        "parameters": ready.parameters,
        "kv_slots": ready.slots,
        "load_seconds": round(ready.load_seconds, 2),
        "warmup_seconds": round(ready.warmup_seconds, 2),
    }
