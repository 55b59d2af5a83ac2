"""`tokenpod bench` as the command line has it: which servers, and what is needed to measure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.util import find_spec

from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.connection import ADDRESS, PANEL, Caller, Remote
from tokenpod_client.cli.errors import print_error
from tokenpod_client.cli.options import command, option

#: What the extra `bench` brings.
_NEEDED = ("numpy", "rich", "msgspec", "uvloop")


@dataclass(frozen=True, kw_only=True)
class Servers(Caller):
    """The servers to measure."""

    address: list[str] | None = option(
        "A server; requests take turns. Repeatable. Default: 127.0.0.1:50051.",
        ADDRESS,
        panel=PANEL,
        envvar="TOKENPOD_ADDRESS",
        show_envvar=True,
    )

    @property
    def remotes(self) -> list[Remote]:
        """Each of them. Raises BadParameter for what can't be one."""
        shown = {each.name: getattr(self, each.name) for each in fields(Caller)}
        chosen = self.address or ["127.0.0.1:50051"]
        return [Remote(address=one, **shown).checked() for one in chosen]


@command(Servers, BenchOptions)
def bench(servers: Servers, options: BenchOptions) -> int:
    """Measure a running server under load: throughput, latencies, goodput."""
    remotes = servers.remotes
    if lacking := [name for name in _NEEDED if find_spec(name) is None]:
        print_error(f"bench needs {lacking[0]}: pip install 'tokenpod-client[bench]'")
        return 1

    # Here, not above: numpy and grpc would delay every other command's help.
    from tokenpod_client.cli.bench.command import bench as measure

    return measure(remotes, options)
