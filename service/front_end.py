"""A further front end as a process of its own: `python -m tokenpod.service.front_end`.

The first one starts it and writes a `FrontEndConfig` to its standard input; it ends when that
closes. The first one handles signals. front_ends.py says which front end does what.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tokenpod.core.diagnosis import answer_questions
from tokenpod.core.own_process import die_with_parent
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.pod.client import EngineClient, EngineLost
from tokenpod.service.pod.front_ends import FrontEndConfig
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.certificates import credentials
from tokenpod.service.rpc.listen import StartError, bind_all, public_server
from tokenpod.service.rpc.relay import relay_of
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import GenerateService
from tokenpod.service.telemetry.choice import telemetry_of
from tokenpod.service.telemetry.logs import configure_logging
from tokenpod.service.text.encoder import Encoder
from tokenpod.service.text.tokenizers.tokenizer import TokenizerError

log = logging.getLogger("tokenpod")

_TELL_SECONDS = 0.25


async def run(config: FrontEndConfig, settings: ServerSettings) -> int:
    """Serve until the first front end hangs up; the exit status. Raises StartError."""
    hung_up = asyncio.create_task(_end_of_input())
    counters = PodCounters.join(config.counters, config.index, config.count)
    telemetry = telemetry_of(settings, counters)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(telemetry.shutdown)
        stack.callback(telemetry.watch_loop())
        if config.scrapes >= 0:
            telemetry.answer_scrapes(config.scrapes)
        client = EngineClient(index=config.index, count=config.count, life=config.life)
        await client.open(socket.socket(fileno=config.link))
        stack.callback(client.close)
        admission = Admission.of(settings, counters)
        generate = GenerateService(admission)
        # Whether the pod is healthy is the first one's to say, and is relayed.
        backend = Backend(TABLE, admission, generate, healthy=_never_asked, relays=True)
        relay = await stack.enter_async_context(
            relay_of(config.relay_address, config.relay_secret, TABLE)
        )
        recording = telemetry.interceptors(TABLE)
        server, closing = public_server(settings, backend, recording, [relay])
        encoder = await Encoder.start(Path(config.model_folder), settings, stack)
        events: set[asyncio.Future[Any]] = {client.ready, client.lost, hung_up}
        await asyncio.wait(events, return_when="FIRST_COMPLETED")
        if hung_up.done() or client.lost.done():
            return 0
        generate.start(settings, client, encoder, client.ready.result())
        admission.closed = None
        # As in the first one.
        gc.collect()
        gc.freeze()
        bind_all(server, config.address, settings, credentials(settings))
        await server.start()
        counters.set_serving()
        await _keep_in_touch(client, counters, hung_up)
        if not client.lost.done():
            await closing.stop(server, 0.5)
            return 0
        # Its calls have failed already; a moment for the answers to be sent. If the engine
        # lives and has only dropped this front end, the first one sees this process end.
        await closing.stop(server, 1.0)
        log.error("the link to the engine was lost", extra={"front_end": config.index})
    return 1


def main() -> int:
    """Be one front end."""
    die_with_parent()
    # The first front end decides when to stop; a terminal's Ctrl-C reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontEndConfig)
    settings = ServerSettings.model_validate(config.settings)
    configure_logging(level=settings.log_level, json_output=settings.json_output)
    answer_questions(config.questions)
    try:
        return uvloop.run(run(config, settings))
    except (StartError, TokenizerError, EngineLost) as error:
        log.error("a front end cannot start", extra={"reason": str(error)})
        return 1


async def _keep_in_touch(
    client: EngineClient, counters: PodCounters, hung_up: asyncio.Task[None]
) -> None:
    """Show the first front end that we live, and what waits here, until it or the engine is gone.

    Its health is the pod's.
    """
    gone: set[asyncio.Future[Any]] = {client.lost, hung_up}
    while not any(future.done() for future in gone):
        counters.beat()
        counters.set_pending(client.pending)
        await asyncio.wait(gone, timeout=_TELL_SECONDS, return_when="FIRST_COMPLETED")


async def _end_of_input() -> None:
    """Until standard input closes."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()


def _never_asked() -> bool:
    raise AssertionError("health is relayed")


if __name__ == "__main__":
    sys.exit(main())
