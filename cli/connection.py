"""The options with which every client command says how a server is reached."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    # grpc takes its time to import: help must come at once.
    from tokenpod.cli.remote import Remote

PANEL = "Connection"

Address = Annotated[
    str,
    typer.Option(metavar="HOST:PORT|unix:PATH", help="The server.", rich_help_panel=PANEL),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="TOKENPOD_TOKEN",
        show_envvar=True,
        help="Bearer token; the variable keeps it out of the process list.",
        rich_help_panel=PANEL,
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls", help="Use TLS and trust the system's authorities.", rich_help_panel=PANEL
    ),
]
_PEM: dict[str, Any] = {"exists": True, "dir_okay": False, "rich_help_panel": PANEL}
TlsCa = Annotated[
    Path | None, typer.Option(help="Use TLS and trust these authorities (PEM).", **_PEM)
]
TlsCert = Annotated[Path | None, typer.Option(help="This client's certificate (PEM).", **_PEM)]
TlsKey = Annotated[Path | None, typer.Option(help="Private key of --tls-cert (PEM).", **_PEM)]
Deadline = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="SECONDS",
        help="Give up after so long; the server stops working on it too.",
        rich_help_panel=PANEL,
    ),
]

_SHARED: dict[str, Any] = {
    "address": Address,
    "token": Token,
    "tls": Tls,
    "tls_ca": TlsCa,
    "tls_cert": TlsCert,
    "tls_key": TlsKey,
    "deadline": Deadline,
}


@dataclass(frozen=True)
class Connection:
    """How to reach a server: the options that every client command has."""

    remote: Remote
    deadline: float | None


def connected(address: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Connection`, and their values as one argument.

    Args:
        address: where the server is unless the operator says otherwise.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        options = [each for each in own if each.name != "connection"]
        shared = [_shared_option(name, kind, address) for name, kind in _SHARED.items()]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in _SHARED}
            deadline = values.pop("deadline")
            command(**given, connection=Connection(remote_of(**values), deadline))

        # Typer reads a command's options off its signature.
        run.__signature__ = inspect.Signature([*options, *shared])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*options, *shared)}
        return run

    return decorate


def _shared_option(name: str, kind: Any, address: str) -> inspect.Parameter:
    default: Any = {"address": address, "tls": False}.get(name)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=kind)


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
