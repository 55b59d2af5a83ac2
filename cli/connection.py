"""How client commands say which server they call, and how it is reached."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from tokenpod.cli.options import option, parameters, takes

PANEL = "Connection"

Metadata = tuple[tuple[str, str], ...]

_option = partial(option, panel=PANEL)
_PEM: dict[str, Any] = {"exists": True, "dir_okay": False}


@dataclass(frozen=True)
class Remote:
    """A server, and what a caller shows it: the options of `connected` commands."""

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

    @property
    def metadata(self) -> Metadata:
        """What identifies the caller on every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def checked(self) -> Remote:
        """Itself. Raises BadParameter for what can't be an address, a token or a key."""
        host, _, port = self.address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
        if not self.address.startswith(("unix:", "dns:")) and not (host and is_port):
            problem = f"is {self.address!r}: write host:port or unix:/path"
            raise typer.BadParameter(problem, param_hint="--address")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise typer.BadParameter("must be printable ASCII", param_hint="--token")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise typer.BadParameter(
                "--tls-cert and --tls-key go together", param_hint="--tls-cert"
            )
        return self


def connected(
    address: str, table: type | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Remote`, and their values as the argument `remote`.

    Args:
        address: where the server is unless the operator says otherwise.
        table: more options, whose values are the argument `options`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        more = parameters(table) if table else []
        shared = parameters(Remote, address=address)
        first = [each for each in own if each.name not in ("remote", "options")]

        @takes([*first, *more, *shared])
        @functools.wraps(command)
        def run(**given: Any) -> None:
            if table:
                given["options"] = table(**{each.name: given.pop(each.name) for each in more})
            values = {each.name: given.pop(each.name) for each in shared}
            command(**given, remote=Remote(**values).checked())

        return run

    return decorate
