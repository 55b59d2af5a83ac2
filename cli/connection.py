"""The options with which every client command says how a server is reached."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenpod.cli.options import option, parameters, takes

if TYPE_CHECKING:
    # grpc takes its time to import: help must come at once.
    from tokenpod.cli.remote import Remote

PANEL = "Connection"

_option = partial(option, panel=PANEL)
_PEM: dict[str, Any] = {"exists": True, "dir_okay": False}


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """The options of `connected` commands."""

    address: str = _option("The server.", "HOST:PORT|unix:PATH", default="")
    token: str | None = _option(
        "Bearer token; the variable keeps it out of the process list.",
        envvar="TOKENPOD_TOKEN",
        show_envvar=True,
    )
    tls: bool = _option("Use TLS and trust the system's authorities.", flag="--tls", default=False)
    tls_ca: Path | None = _option("Use TLS and trust these authorities (PEM).", **_PEM)
    tls_cert: Path | None = _option("This client's certificate (PEM).", **_PEM)
    tls_key: Path | None = _option("Private key of --tls-cert (PEM).", **_PEM)
    deadline: float | None = _option(
        "Give up after so long; the server stops working on it too.", "SECONDS", min=0.001
    )


@dataclass(frozen=True)
class Connection:
    """How to reach a server: the options that every client command has."""

    remote: Remote
    deadline: float | None


def connected(
    address: str, table: type | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Connection`, and their values as the argument `connection`.

    Args:
        address: where the server is unless the operator says otherwise.
        table: more options, whose values are the argument `options`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        more = parameters(table) if table else []
        shared = parameters(ConnectionOptions, address=address)
        first = [each for each in own if each.name not in ("connection", "options")]

        @takes([*first, *more, *shared])
        @functools.wraps(command)
        def run(**given: Any) -> None:
            if table:
                given["options"] = table(**{each.name: given.pop(each.name) for each in more})
            values = {each.name: given.pop(each.name) for each in shared}
            deadline = values.pop("deadline")
            command(**given, connection=Connection(remote_of(**values), deadline))

        return run

    return decorate


def remote_of(
    address: str,
    token: str | None,
    tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> Remote:
    """How to reach a server. Raises BadParameter for what can't be an address."""
    from tokenpod.cli.remote import Remote

    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not address.startswith(("unix:", "dns:")) and not (host and is_port):
        problem = f"is {address!r}: write host:port or unix:/path"
        raise typer.BadParameter(problem, param_hint="--address")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise typer.BadParameter("must be printable ASCII", param_hint="--token")
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together", param_hint="--tls-cert")
    return Remote(address, token, tls, tls_ca, tls_cert, tls_key)
