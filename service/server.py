"""Build and run the server: listen, load, serve, drain.

The order matters to those who watch from outside:

    bind every address        a taken port fails within a second, before anything is loaded
    answer health             "starting" is NOT_SERVING, not a refused connection
    load and warm up          in the engine's process
    SERVING
    SIGTERM                   NOT_SERVING but still serving for the lame-duck seconds
                              -> new work is refused while streams and routers' batches go on
                              -> what is left after the grace ends with UNAVAILABLE
                              -> ports are closed and child processes ended; then "stopped" is
                                 logged, and the process ends
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from tokenpod.core.messages import Ready, Vocabulary
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.config.sources import ServerSettings, SettingsError
from tokenpod.service.listeners import listen
from tokenpod.service.overview import overview, summary
from tokenpod.service.pod.client import EngineLost
from tokenpod.service.pod.control_stream import DrainRequests
from tokenpod.service.pod.engine_start import ENGINE_COMMAND, StartedEngine, start_engines
from tokenpod.service.pod.front_ends import FrontEndConfig, FrontEndLost, FrontEnds
from tokenpod.service.pod.model_store import (
    ModelNotFound,
    adapter_folders,
    draft_folder,
    model_folder,
)
from tokenpod.service.pod.placement import engine_options
from tokenpod.service.pod.processes import PodProcesses
from tokenpod.service.pod.progress import LoadingBar
from tokenpod.service.pod.ranks import Ranks
from tokenpod.service.pod.startup import GroupStartup
from tokenpod.service.pod.stopping import Stopping
from tokenpod.service.pod_state import PodState, Renewal
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.certificates import expiry
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.listen import (
    StartError,
)
from tokenpod.service.rpc.relay import serve_relay
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import GenerateService
from tokenpod.service.serving.serving import check_limits, request_limits
from tokenpod.service.serving.shard import ShardService
from tokenpod.service.shutdown import (
    drain,
    drain_for_follower,
    end_stalled,
    send_away,
    stop_follower,
)
from tokenpod.service.telemetry.choice import telemetry_of
from tokenpod.service.telemetry.logs import LineWriter, configure_logging, print_error
from tokenpod.service.telemetry.recorder import PodReadings
from tokenpod.service.text.encoder import Encoder
from tokenpod.service.text.tokenizers.draft_vocabulary import check_draft
from tokenpod.service.text.tokenizers.tokenizer import TokenizerError

log = logging.getLogger("tokenpod")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a server has ended.

    Args:
        status: the process's exit status.
        stopped: what a stop has cut off, for the log; None: nobody has asked it to stop.
    """

    status: int
    stopped: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class Server:
    """A pod's first front end; `engine_command` is what runs the engine.

    `engines` have been started; later lives of a group start their own.
    `log_lines`: writes what people read. `adapters`: names and folders of those that are loaded
    with the model; `draft`: its draft model's folder.
    """

    settings: ServerSettings
    model_folder: Path
    log_lines: LineWriter
    engines: list[StartedEngine]
    engine_command: Sequence[str] = ENGINE_COMMAND
    adapters: Sequence[tuple[str, str]] = ()
    draft: Path | None = None

    async def run(self) -> Ended:
        """Serve until a signal; on return nothing listens any more. Raises StartError."""
        async with contextlib.AsyncExitStack() as stack:
            state = await self._pod_state(stack)
            status = None
            while status is None:
                async with contextlib.AsyncExitStack() as life:
                    status = await self._live(state, life)
        return Ended(status, state.stopped)

    # -- what lasts ------------------------------------------------------------------------------

    async def _pod_state(self, stack: contextlib.AsyncExitStack) -> PodState:
        settings = self.settings
        # Front ends that admit calls at the same instant may let one too many in, each.
        names = settings.resolved_concurrent_requests + settings.resolved_front_ends
        counters = PodCounters.create(settings.resolved_front_ends, names)
        telemetry = telemetry_of(settings, counters)
        stack.callback(telemetry.shutdown)
        admission = Admission.of(settings, counters)
        board = HealthBoard(
            follows=not settings.leads,
            stall_timeout=settings.stall_timeout,
            counters=counters,
        )
        stack.callback(board.close)
        generate = GenerateService(admission)
        processes = PodProcesses(settings.log_level)
        # Where no rpc comes through, or nobody has a token.
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, processes.switch_level)
        shown = None if settings.admin_token_file is None else processes
        backend = Backend(TABLE, admission, generate, board.is_serving, shown)
        stopping = Stopping.by_signals()
        listener = await listen(settings, backend, telemetry, board, stack)
        # Whatever the way out, also while a group forms.
        stack.push_async_callback(listener.stop, 0.5, stopping.sleep)
        state = PodState(
            counters=counters,
            admission=admission,
            board=board,
            backend=backend,
            listener=listener,
            stopping=stopping,
            startup=GroupStartup(settings.start_timeout),
            renewal=Renewal(),
            telemetry=telemetry,
            processes=processes,
        )
        telemetry.watch(state.load)
        started_at = time.time()
        telemetry.watch_pod(lambda: self._readings(state, started_at))
        stack.callback(telemetry.watch_loop())
        return state

    def _readings(self, state: PodState, started_at: float) -> PodReadings:
        """What metrics say of the pod; called from other threads, and only if telemetry is on."""
        cert = self.settings.tls_cert
        return PodReadings(
            started_at=started_at,
            ready=state.board.is_serving() and state.admission.closed is None,
            stalled=state.counters.stalled,
            admitted=state.counters.requests,
            call_bytes=state.counters.call_bytes,
            most_call_bytes=self.settings.resolved_front_end_bytes,
            certificate_expires=None if cert is None else expiry(cert),
        )

    # -- one life of the engines -----------------------------------------------------------------

    async def _live(self, state: PodState, life: contextlib.AsyncExitStack) -> int | None:
        """Start engines, and serve until a signal or a loss.

        Returns:
            The exit status; None: a rank was lost, and the group is to form again.
        """
        bar = LoadingBar(self.settings.model_id)
        life.callback(bar.close)
        telling = asyncio.create_task(bar.tell())
        life.callback(telling.cancel)
        ranks, drains = await self._start_ranks(state, bar, life)
        others = await self._start_front_ends(state, ranks, life)
        loading = asyncio.create_task(self._load(state, ranks, others, life))
        loading.add_done_callback(lambda _: telling.cancel())
        await asyncio.wait([loading, state.stopping.task()], return_when="FIRST_COMPLETED")
        if not loading.done():
            loading.cancel()
            state.stopped = {}
            return 0
        try:
            encoder, ready = loading.result()
        except EngineLost as lost:
            await state.startup.try_again(str(lost))
            return None
        # Not while connections are being closed.
        await state.renewal.end()
        self._open(state, ranks, drains, encoder, ready, life)
        state.board.watch(ranks.client)
        stalled = asyncio.create_task(end_stalled(self.settings, state.board, ranks))
        life.callback(stalled.cancel)
        state.client = ranks.client
        state.admission.closed = None
        state.startup.done()
        # These objects stay: looking through them for garbage would block the loop for tens of ms.
        gc.collect()
        gc.freeze()
        await state.board.set_serving(True)
        self._tell(ready, state.listener.address)
        return await self._serve(state, ranks, drains, others)

    def _tell(self, ready: Ready, address: str) -> None:
        """What is served, and every limit: in the log, and for people as a table."""
        settings = self.settings
        log.info("serving", extra=summary(settings, ready, address))
        if not settings.json_output:
            lines = overview(settings, ready, request_limits(settings, ready), address)
            self.log_lines.tell("\n".join(lines))

    async def _start_ranks(
        self, state: PodState, bar: LoadingBar, life: contextlib.AsyncExitStack
    ) -> tuple[Ranks, DrainRequests]:
        settings = self.settings
        drains = DrainRequests(leads=settings.leads)
        life.callback(drains.close)
        if not self.engines:
            self.engines.extend(start_engines(settings, self.engine_command))
        ranks = await Ranks.start(
            self.engines,
            engine_options(
                settings, self.model_folder, state.listener.address, self.adapters, self.draft
            ),
            bar.update,
            on_waiting=state.startup.wait_for,
            on_drain=drains.deliver,
            processes=state.processes,
        )
        self.engines.clear()
        life.push_async_callback(ranks.stop)
        drains.open(ranks.first.control)
        return ranks, drains

    async def _start_front_ends(
        self, state: PodState, ranks: Ranks, life: contextlib.AsyncExitStack
    ) -> FrontEnds:
        """The further front ends, and what they reach this one by; none if one is enough."""
        counters = state.counters
        if counters.count == 1:
            return FrontEnds(counters)
        for index in range(1, counters.count):
            # What a life before has left.
            counters.forget(index)
        relay, address, secret = await serve_relay(self.settings, state.backend, state.board)
        life.push_async_callback(relay.stop, None)
        assert counters.descriptor is not None
        config = FrontEndConfig(
            count=counters.count,
            settings=self.settings.model_dump(mode="json") | {"config": None},
            model_folder=str(self.model_folder),
            address=state.listener.address,
            relay_address=address,
            relay_secret=secret,
            counters=counters.descriptor,
        )
        others = FrontEnds(
            counters,
            config,
            ranks.first.spare_links,
            ranks.first.new_link,
            state.telemetry.front_end_socket,
            state.processes,
        )
        life.push_async_callback(others.stop)
        return others

    async def _load(
        self, state: PodState, ranks: Ranks, others: FrontEnds, life: contextlib.AsyncExitStack
    ) -> tuple[Encoder, Ready]:
        """Wait until ranks, front ends and tokenizer are ready.

        Raises:
            StartError: another try would fail, too.
            EngineLost: another try may succeed.
        """
        try:
            async with asyncio.timeout(state.startup.left):
                encoder = await Encoder.start(self.model_folder, self.settings, life)
                if self.draft is not None:
                    await asyncio.to_thread(check_draft, encoder.tokenizer, self.draft)
                # Constraints need to know what tokens stand for, in the engine that plans.
                known = None
                if self.settings.leads:
                    known = await asyncio.to_thread(encoder.tokenizer.token_bytes)
                ready = await ranks.ready()
                encoder.tokenizer.check(ready.vocab_size)
                check_limits(self.settings, ready)
                if known is not None:
                    ranks.client.send(Vocabulary(*known))
                await others.serving()
                return encoder, ready
        except (TokenizerError, FrontEndLost, SettingsError) as error:
            raise StartError(str(error)) from error
        except EngineLost as error:
            if self.settings.world == 1 or error.fault:
                raise StartError(str(error)) from error
            raise
        except TimeoutError as error:
            raise StartError(state.startup.too_long) from error

    def _open(
        self,
        state: PodState,
        ranks: Ranks,
        drains: DrainRequests,
        encoder: Encoder,
        ready: Ready,
        life: contextlib.AsyncExitStack,
    ) -> None:
        """Give the rpcs their services."""
        settings, backend, model_id = self.settings, state.backend, self.settings.served_name
        serving = backend.generate.start(settings, ranks.client, encoder, ready)
        if leader := ranks.leader_address:
            backend.follow(ready, model_id=model_id, leader_address=leader)
        else:
            shard = ShardService(serving, state.admission, lease=settings.router_lease)
            life.callback(shard.close)
            backend.start(ready, shard, model_id=model_id, url=state.listener.shard_url)
            drains.drain = lambda: drain_for_follower(settings, state)
        if state.listener.socket is not None:
            state.listener.socket.show()

    async def _serve(
        self, state: PodState, ranks: Ranks, drains: DrainRequests, others: FrontEnds
    ) -> int | None:
        """Until a signal, or until an engine or a front end is lost; the exit status, or None."""
        futures: set[asyncio.Future[Any]] = {state.stopping.task(), ranks.lost, others.lost}
        await asyncio.wait(futures, return_when="FIRST_COMPLETED")
        if ranks.lost.done():
            return await self._lose(state, ranks)
        if others.lost.done():
            # Its streams are gone; those of the others may end well before the pod starts anew.
            log.error("a front end was lost", extra={"reason": str(others.lost.result())})
        if self.settings.leads:
            await drain(self.settings, state, others)
        else:
            await stop_follower(self.settings, state, ranks, drains)
        return 1 if others.lost.done() or state.board.stuck.done() else 0

    async def _lose(self, state: PodState, ranks: Ranks) -> int | None:
        """An engine is lost, and its calls have failed."""
        lost = ranks.lost.result()
        await state.board.set_serving(False)
        await state.board.unwatch()
        state.client = None
        if self.settings.world == 1:
            log.error("the engine was lost", extra={"reason": str(lost)})
            # A stopped or stuck engine is killed first, so that further front ends see its end.
            await ranks.stop()
            # A moment for the answers to be sent.
            await state.listener.stop(1.0, state.stopping.sleep)
            return 1
        log.error("a rank was lost; the group forms again", extra={"reason": str(lost)})
        send_away(self.settings, state)
        return None


def run(
    settings: ServerSettings,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    engines: Sequence[StartedEngine] = (),
) -> int:
    """Run a server in this process; its exit status. One line on standard error if it can't.

    `engines`: those of the pod, if they have been started; what runs others is `engine_command`.
    """
    writer = configure_logging(level=settings.log_level, json_output=settings.json_output)
    try:
        folder, adapters = model_folder(settings), adapter_folders(settings.lora_adapters)
        server = Server(
            settings,
            folder,
            writer,
            [*engines],
            engine_command,
            adapters,
            draft_folder(settings),
        )
        ended = uvloop.run(server.run())
    except (StartError, ModelNotFound) as error:
        print_error(str(error), json_output=settings.json_output)
        return 1
    if ended.stopped is not None:
        # Last of all: who reads it may take the ports, or count on the memory of the processes.
        log.info("stopped", extra=ended.stopped)
    return ended.status
