"""Build and run the server: listen, load, serve, drain.

The order matters to those who watch from outside:

    bind every address        a taken port fails within a second, before anything is loaded
    answer health             "starting" is NOT_SERVING, not a refused connection
    load and warm up          in the engine's process
    SERVING
    SIGTERM                   NOT_SERVING but still serving for the lame-duck seconds
                              -> new work is refused while streams and routers' batches go on
                              -> what is left after the grace ends with UNAVAILABLE
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from tokenpod.config import ServerSettings
from tokenpod.core.messages import Ready
from tokenpod.service.admission import Admission
from tokenpod.service.client import EngineLost
from tokenpod.service.closing import Closing
from tokenpod.service.drain_requests import DrainRequests
from tokenpod.service.engine_process import ENGINE_COMMAND
from tokenpod.service.follower import FollowerShard
from tokenpod.service.forming import Forming
from tokenpod.service.front_ends import FrontEndLost, FrontEnds, PodProgress, Way
from tokenpod.service.generate import GenerateService, Serving, request_limits
from tokenpod.service.health import HealthBoard, serve_health
from tokenpod.service.house import House
from tokenpod.service.interceptors import AuthInterceptor, ErrorInterceptor
from tokenpod.service.leaving import FORMING, drain, make_way, take_leave
from tokenpod.service.listen import (
    StartError,
    bind,
    channel_options,
    check_port,
    credentials,
    reason,
)
from tokenpod.service.logs import configure_logging
from tokenpod.service.model_store import ModelNotFound, resolve_model
from tokenpod.service.parts import CurrentLoad, Listener, Parts
from tokenpod.service.placement import engine_options
from tokenpod.service.progress import LoadingBar
from tokenpod.service.ranks import Ranks
from tokenpod.service.reflection import enable_reflection
from tokenpod.service.relay import serve_relay
from tokenpod.service.router_socket import RouterSocket
from tokenpod.service.servicers import Rpcs, Shard, add_servicers
from tokenpod.service.shard import ShardService
from tokenpod.service.stopping import Stopping
from tokenpod.service.telemetry import Telemetry, TelemetrySettings
from tokenpod.service.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("tokenpod")


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
        async with contextlib.AsyncExitStack() as stack:
            parts = await self._parts(stack)
            while True:
                async with contextlib.AsyncExitStack() as life:
                    status = await self._live(parts, life)
                if status is not None:
                    return status

    # -- what lasts ------------------------------------------------------------------------------

    async def _parts(self, stack: contextlib.AsyncExitStack) -> Parts:
        settings = self.settings
        telemetry = Telemetry.start(
            TelemetrySettings(
                settings.otlp_endpoint, settings.otlp_service_name, settings.otlp_sample_ratio
            )
        )
        stack.callback(telemetry.shutdown)
        load = CurrentLoad()
        telemetry.watch(load)
        house = House.create(settings.resolved_front_ends)
        admission = Admission(
            max_requests=settings.max_concurrent_requests,
            max_queue_tokens=settings.max_queue_tokens,
            house=house,
        )
        board = HealthBoard(follows=not settings.leads)
        stack.callback(board.close)
        generate = GenerateService(admission, telemetry)
        rpcs = Rpcs(admission, generate, healthy=board.is_serving)
        stopping = Stopping.by_signals()
        listener = await self._listen(rpcs, telemetry, board, stack)
        # Whatever the way out, also while a group forms.
        stack.push_async_callback(listener.stop, 0.5, stopping.sleep)
        return Parts(
            house=house,
            admission=admission,
            board=board,
            generate=generate,
            rpcs=rpcs,
            listener=listener,
            stopping=stopping,
            forming=Forming(settings.start_timeout),
            load=load,
        )

    async def _listen(
        self, rpcs: Rpcs, telemetry: Telemetry, board: HealthBoard, stack: contextlib.AsyncExitStack
    ) -> Listener:
        settings = self.settings
        interceptors: list[grpc.aio.ServerInterceptor] = [*telemetry.interceptors()]
        interceptors.append(ErrorInterceptor())
        if settings.auth_token_file is not None:
            interceptors.append(AuthInterceptor(settings.auth_token_file))
        closing = Closing(settings.max_concurrent_requests)
        interceptors.append(closing)
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
        shard_url, socket = address, None
        if (path := settings.socket_path) is not None:
            trusting = [*telemetry.interceptors(), ErrorInterceptor()]
            socket = await RouterSocket.listen(settings, path, rpcs, board, trusting)
            stack.push_async_callback(socket.stop, None)
            shard_url = f"unix://{path}"
        if (health_address := settings.health_address) is not None:
            try:
                health, _ = await serve_health(health_address, board)
            except (OSError, RuntimeError) as error:
                raise StartError(f"cannot listen on {health_address}: {reason(error)}") from error
            stack.push_async_callback(health.stop, None)
        await server.start()
        return Listener(server, closing, address, shard_url, socket)

    # -- one life of the engines -----------------------------------------------------------------

    async def _live(self, parts: Parts, life: contextlib.AsyncExitStack) -> int | None:
        """Start engines, and serve until a signal or a loss.

        Returns:
            The exit status; None: a rank was lost, and the group is to form again.
        """
        ranks, drains = await self._start_ranks(parts, life)
        others = await self._start_front_ends(parts, ranks, life)
        loading = asyncio.create_task(self._load(parts, ranks, others))
        await asyncio.wait([loading, parts.stopping.task()], return_when="FIRST_COMPLETED")
        if not loading.done():
            loading.cancel()
            return 0
        try:
            tokenizer, ready = loading.result()
        except EngineLost as lost:
            await parts.forming.try_again(str(lost))
            return None
        self._open(parts, ranks, drains, tokenizer, ready, life)
        parts.board.watch(PodProgress(ranks.client, parts.house))
        parts.load.client = ranks.client
        parts.admission.closed = None
        parts.forming.done()
        await parts.board.set_serving(True)
        log.info("serving", extra=_summary(self.settings, ready, parts.listener))
        return await self._serve(parts, ranks, drains, others)

    async def _start_ranks(
        self, parts: Parts, life: contextlib.AsyncExitStack
    ) -> tuple[Ranks, DrainRequests]:
        settings = self.settings
        bar = LoadingBar(settings.model_id)
        life.callback(bar.close)
        drains = DrainRequests(leads=settings.leads)
        life.callback(drains.close)
        ranks = await Ranks.start(
            engine_options(settings, self.model_folder, parts.listener.address),
            bar.update,
            self.engine_command,
            links=parts.house.count,
            on_waiting=parts.forming.wait_for,
            on_letter=drains.deliver,
        )
        life.push_async_callback(ranks.stop)
        drains.open(ranks.first.line)
        return ranks, drains

    async def _start_front_ends(
        self, parts: Parts, ranks: Ranks, life: contextlib.AsyncExitStack
    ) -> FrontEnds:
        """The further front ends, and what they reach this one by; none if one is enough."""
        house = parts.house
        if house.count == 1:
            return FrontEnds([], house)
        for index in range(1, house.count):
            # What a life before has left.
            house.forget(index)
        relay, address, secret = await serve_relay(parts.rpcs, parts.board)
        life.push_async_callback(relay.stop, None)
        others = FrontEnds.start(
            self.settings,
            self.model_folder,
            ranks.first.spare_links,
            house,
            Way(parts.listener.address, address, secret),
        )
        life.push_async_callback(others.stop)
        return others

    async def _load(self, parts: Parts, ranks: Ranks, others: FrontEnds) -> tuple[Tokenizer, Ready]:
        """Wait for all of it.

        Raises:
            StartError: it is of no use to try again.
            EngineLost: it may be.
        """
        try:
            async with asyncio.timeout(parts.forming.left):
                tokenizer = await asyncio.to_thread(Tokenizer.load, self.model_folder)
                ready = await ranks.ready()
                await others.serving()
                return tokenizer, ready
        except (TokenizerError, FrontEndLost) as error:
            raise StartError(str(error)) from error
        except EngineLost as error:
            if self.settings.world == 1 or error.fault:
                raise StartError(str(error)) from error
            raise
        except TimeoutError as error:
            raise StartError(parts.forming.too_long) from error

    def _open(
        self,
        parts: Parts,
        ranks: Ranks,
        drains: DrainRequests,
        tokenizer: Tokenizer,
        ready: Ready,
        life: contextlib.AsyncExitStack,
    ) -> None:
        """Put the services behind the rpcs."""
        settings = self.settings
        limits = request_limits(settings, ready)
        leader = ranks.leader_address
        serving = Serving(ranks.client, tokenizer, limits, settings.model_id, leader)
        parts.generate.start(serving)
        shard: Shard
        if leader:
            shard = FollowerShard(leader)
        else:
            shard = leading = ShardService(
                serving,
                parts.admission,
                urls=[parts.listener.shard_url],
                lease=settings.router_lease,
            )
            life.callback(leading.close)
            drains.drain = lambda: make_way(settings, parts)
        parts.rpcs.start(ready, shard, model_id=settings.model_id)
        if parts.listener.socket is not None:
            parts.listener.socket.show()

    async def _serve(
        self, parts: Parts, ranks: Ranks, drains: DrainRequests, others: FrontEnds
    ) -> int | None:
        """Until a signal, or until an engine or a front end is lost; see `_live`."""
        futures: set[asyncio.Future[Any]] = {parts.stopping.task(), ranks.lost, others.lost}
        if self.settings.world > 1:
            futures.add(parts.board.stuck)
        await asyncio.wait(futures, return_when="FIRST_COMPLETED")
        if self.settings.world > 1 and parts.board.stuck.done():
            ranks.give_up("no step has finished for too long: a rank must be stuck")
        if ranks.lost.done():
            return await self._lose(parts, ranks.lost.result())
        if others.lost.done():
            # Its streams are gone; those of the others may end well before the pod starts anew.
            log.error("a front end was lost", extra={"reason": str(others.lost.result())})
        if self.settings.leads:
            await drain(self.settings, parts, others)
        else:
            await take_leave(self.settings, parts, ranks, drains)
        return 1 if others.lost.done() else 0

    async def _lose(self, parts: Parts, lost: EngineLost) -> int | None:
        """An engine is gone, and its clients have been told."""
        await parts.board.set_serving(False)
        if self.settings.world == 1:
            log.error("the engine was lost", extra={"reason": str(lost)})
            # A moment for the answers to leave.
            await parts.listener.stop(1.0, parts.stopping.sleep)
            return 1
        parts.admission.closed = FORMING
        log.error("a rank was lost; the group forms again", extra={"reason": str(lost)})
        parts.forming.begin()
        return None


def run(settings: ServerSettings, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Run a server in this process; its exit status. One line on standard error if it can't."""
    configure_logging(level=settings.log_level, json_output=settings.json_output)
    try:
        folder = resolve_model(settings.model_id, settings.revision)
        return uvloop.run(Server(settings, folder, engine_command).run())
    except (StartError, ModelNotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _summary(settings: ServerSettings, ready: Ready, listener: Listener) -> dict[str, object]:
    return {
        "model_id": settings.model_id,
        "address": listener.address,
        "dtype": ready.dtype,
        "kv_cache_dtype": ready.kv_cache_dtype,
        "quantize": settings.quantize,
        "rope": ready.rope,
        "device": ready.device_type,
        "front_ends": settings.resolved_front_ends,
        "parameters": ready.parameters,
        "kv_slots": ready.slots,
        "load_seconds": round(ready.load_seconds, 2),
        "warmup_seconds": round(ready.warmup_seconds, 2),
    }
