"""A server in this process, from its settings to its exit status."""

from __future__ import annotations

from collections.abc import Sequence

import uvloop

from tokenpod.service.config import ServerSettings
from tokenpod.service.pod.engine_process import ENGINE_COMMAND
from tokenpod.service.pod.model_store import ModelNotFound, resolve_model
from tokenpod.service.rpc.listen import StartError
from tokenpod.service.server import Server
from tokenpod.service.telemetry.logs import configure_logging, print_error


def run(settings: ServerSettings, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Run a server in this process; its exit status. One line on standard error if it can't."""
    configure_logging(level=settings.log_level, json_output=settings.json_output)
    try:
        folder = resolve_model(settings.model_id, settings.revision)
        return uvloop.run(Server(settings, folder, engine_command).run())
    except (StartError, ModelNotFound) as error:
        print_error(str(error), json_output=settings.json_output)
        return 1
