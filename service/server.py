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
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from tokenpod.config import ServerSettings
from tokenpod.engine.types import EngineOptions, Ready
from tokenpod.service.admission import Admission
from tokenpod.service.engine_process import EngineLost, EngineProcess
from tokenpod.service.generate import GenerateService, Serving
from tokenpod.service.health import HealthBoard, serve_health
from tokenpod.service.interceptors import AuthInterceptor, ErrorInterceptor
from tokenpod.service.logs import configure_logging
from tokenpod.service.model_store import ModelNotFound, resolve_model
from tokenpod.service.progress import LoadingBar
from tokenpod.service.reflection import enable_reflection
from tokenpod.service.servicers import Rpcs, add_servicers
from tokenpod.service.shard import ShardService
from tokenpod.service.telemetry import Telemetry
from tokenpod.service.tokenizer import Tokenizer, TokenizerError
from tokenpod.service.validate import RequestLimits

log = logging.getLogger("tokenpod")


class StartError(Exception):
    """The server cannot start; the text is one line for the operator."""


@dataclass(slots=True)
class Server:
    """A running pod's front end. `run` does everything; the parts are for reading.

    Args:
        settings: the operator's.
        model_folder: where the model lies.
    """

    settings: ServerSettings
    model_folder: Path

    async def run(self) -> int:
        """Serve until a signal; the process's exit status. Raises StartError."""
        settings = self.settings
        telemetry = Telemetry.start(settings.telemetry())
        admission = Admission(
            max_requests=settings.max_concurrent_requests,
            max_queue_tokens=settings.max_queue_tokens,
        )
        board = HealthBoard()
        generate = GenerateService(admission, telemetry)
        rpcs = Rpcs(admission, generate, board.is_serving)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(telemetry.shutdown)
            listener = await self._listen(rpcs, telemetry, board, stack)
            tokenizer, engine, ready = await self._load(stack)
            limits = request_limits(settings, ready)
            serving = Serving(engine.client, tokenizer, limits, settings.model_id)
            generate.start(serving)
            rpcs.start(
                ready,
                ShardService(
                    serving,
                    urls=[listener.shard_url],
                    prefill_tokens=settings.resolved_prefill_tokens(),
                ),
            )
            await board.watch(lambda: progress_of(engine))
            admission.closed = None
            board.set_serving(True)
            log.info(
                "serving",
                extra={
                    "model_id": settings.model_id,
                    "address": listener.address,
                    "dtype": ready.dtype,
                    "device": ready.device_type,
                    "kv_slots": ready.slots,
                    "load_seconds": round(ready.load_seconds, 2),
                },
            )
            return await self._serve(listener.server, engine, admission, board)
