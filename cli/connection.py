"""How client commands say which server they call, and how it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from tokenpod_client.channel import metadata_of
from tokenpod_client.cli.options import option

PANEL = "Connection"
#: How an address is written.
ADDRESS = "HOST:PORT|unix:PATH"

Metadata = tuple[tuple[str, str], ...]

_option = partial(option, panel=PANEL)
_PEM: dict[str, Any] = {"exists": True, "dir_okay": False}


@dataclass(frozen=True, kw_only=True)
class Caller:
    """What a caller shows a server, and what it trusts."""

    token: str | None = _option(
        "Bearer token; the variable keeps it out of the process list.",
        envvar="TOKENPOD_TOKEN",
        show_envvar=True,
    )
    tls: bool = _option("Use TLS and trust the system's authorities.", flag="--tls", default=False)
    tls_ca: Path | None = _option("Use TLS and trust these authorities (PEM).", **_PEM)
    tls_cert: Path | None = _option("This client's certificate (PEM).", **_PEM)
    tls_key: Path | None = _option("Private key of --tls-cert (PEM).", **_PEM)


@dataclass(frozen=True, kw_only=True)
class Remote(Caller):
    """A server, how it is called, and for how long."""

    address: str = _option(
        "The server.",
        ADDRESS,
        default="127.0.0.1:50051",
        envvar="TOKENPOD_ADDRESS",
        show_envvar=True,
    )
    deadline: float | None = _option(
        "Give up after so long; the server stops working on it too.", "SECONDS", min=0.001
    )

    @property
    def metadata(self) -> Metadata:
        """What identifies the caller on every call."""
        return metadata_of(self.token)

    def checked(self) -> Remote:
        """Itself. Raises BadParameter for what can't be an address, a token or a key."""
        host, _, port = self.address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
        if not self.address.startswith(("unix:", "dns:")) and not (host and is_port):
            problem = f"is {self.address!r}: write host:port or unix:/path"
            raise click.BadParameter(problem, param_hint="--address")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise click.BadParameter("must be printable ASCII", param_hint="--token")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise click.BadParameter(
                "--tls-cert and --tls-key go together", param_hint="--tls-cert"
            )
        return self
