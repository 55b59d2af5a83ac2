"""The options with which every client command says how a server is reached."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    # grpc takes its time to import: help must come at once.
    from tokenpod.service.remote import Remote

Connection = "Connection"

Address = Annotated[
    str,
    typer.Option(metavar="HOST:PORT|unix:PATH", help="The server.", rich_help_panel=Connection),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="TOKENPOD_TOKEN",
        show_envvar=True,
        help="Bearer token; the variable keeps it out of the process list.",
        rich_help_panel=Connection,
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls", help="Use TLS and trust the system's authorities.", rich_help_panel=Connection
    ),
]
_PEM: dict[str, Any] = {"exists": True, "dir_okay": False, "rich_help_panel": Connection}
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
        rich_help_panel=Connection,
    ),
]


def remote_of(
    address: str,
    token: str | None,
    tls: bool,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> Remote:
    """How to reach a server. Raises BadParameter for what can't be an address."""
    from tokenpod.service.remote import Remote

    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not address.startswith(("unix:", "dns:")) and not (host and is_port):
        problem = f"is {address!r}: write host:port or unix:/path"
        raise typer.BadParameter(problem, param_hint="--address")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise typer.BadParameter("must be printable ASCII", param_hint="--token")
    if (cert is None) != (key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together", param_hint="--tls-cert")
    return Remote(address, token, tls, ca, cert, key)
