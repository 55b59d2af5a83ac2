"""The unix socket that routers of TGI connect to: a gRPC server of its own.

A router can send no token, so the file's mode guards it. It sends messages of many megabytes, and
fails if a connection is sent a GOAWAY. Its launcher takes the file for the sign that the model
is ready: so the socket is bound under another name in the same folder, and gets its own only then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Sequence

import grpc

from tokenpod.service.config.rules import SOCKET_SUFFIX
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.interceptors import Interceptor, Layers
from tokenpod.service.rpc.listen import PENDING, StartError, add_methods, bind
from tokenpod.service.rpc.methods import Services
from tokenpod.service.rpc.reflection import enable_reflection


class RouterSocket:
    """Make it with `listen`.

    Args:
        server: listens.
        path: of the file, once the model is ready.
    """

    def __init__(self, server: grpc.aio.Server, path: str) -> None:
        self._server = server
        self._path = path
        self._shown = False

    @classmethod
    async def listen(
        cls,
        settings: ServerSettings,
        path: str,
        services: Services,
        board: HealthBoard,
        layers: Sequence[Interceptor],
    ) -> RouterSocket:
        """Listen, out of sight. Raises StartError."""
        server = grpc.aio.server(
            interceptors=[Layers(layers)],
            options=[
                ("grpc.max_receive_message_length", settings.max_router_message_bytes),
                ("grpc.max_send_message_length", -1),
                *PENDING,
            ],
        )
        add_methods(services, server)
        await board.add_to(server, services.table.served)
        enable_reflection(services.table, server)
        hidden = path + SOCKET_SUFFIX
        for each in (path, hidden):
            _free(each)
        bind(server, f"unix:{hidden}", None)
        try:
            _guard(hidden, settings.uds_group)
        except StartError:
            _remove(hidden)
            raise
        await server.start()
        return cls(server, path)

    def show(self) -> None:
        """The model is ready: give the file its name. Also again, after a group has formed anew."""
        if not self._shown:
            os.rename(self._path + SOCKET_SUFFIX, self._path)
            self._shown = True

    async def stop(self, grace: float | None) -> None:
        """End what runs after `grace` seconds (None: now), and remove the file."""
        await self._server.stop(grace)
        _remove(self._path if self._shown else self._path + SOCKET_SUFFIX)


def _guard(path: str, group: str | None) -> None:
    """Let the owner alone open a socket, or a group as well. Raises StartError."""
    try:
        if group is not None:
            shutil.chown(path, group=int(group) if group.isdecimal() else group)
        os.chmod(path, 0o600 if group is None else 0o660)
    except (OSError, LookupError) as error:
        text = error.strerror if isinstance(error, OSError) else "there is no such group"
        raise StartError(f"--uds-group is {group}: {text}") from error


def _free(path: str) -> None:
    """Remove a socket that a dead server left; raises StartError if one answers on it."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise StartError(f"--uds-path: {path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise StartError(f"--uds-path: another server listens on {path}")


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
