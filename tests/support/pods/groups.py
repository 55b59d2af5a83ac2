"""Groups of pods on loopback, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.pods.harness import ServerProcess, free_port, serve
from support.waiting import wait_for

#: Two cores are shared by many processes.
FLAGS = ("--threads", "1")
ENV = {"OMP_NUM_THREADS": "1"}


@dataclass
class Group:
    """Pods that share one model; the first one leads."""

    pods: list[ServerProcess]

    @property
    def leader(self) -> ServerProcess:
        return self.pods[0]

    def wait_until_serving(self) -> None:
        for pod in self.pods:
            wait_for(lambda pod=pod: pod.health("") == 1, log=pod.log)


@contextlib.contextmanager
def pods(count: int, *flags: str, ranks: int = 1, wait: bool = True) -> Iterator[Group]:
    """`count` pods of `ranks` ranks each."""
    master, plans = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        group = Group(
            [
                stack.enter_context(pod(rank, count, master, plans, *flags, ranks=ranks))
                for rank in range(count)
            ]
        )
        if wait:
            group.wait_until_serving()
        yield group


@contextlib.contextmanager
def pod(
    rank: int, count: int, master: int, plans: int, *flags: str, ranks: int = 1
) -> Iterator[ServerProcess]:
    """One pod of a group; it does not wait for the others."""
    place = ["--num-nodes", count, "--node-rank", rank, "--num-shard", ranks]
    place += ["--master-addr", "127.0.0.1", "--master-port", master, "--shard-port", plans]
    with serve(*FLAGS, *map(str, place), *flags, wait=False, env=ENV) as server:
        server.uds = f"{server.uds.removesuffix('-0')}-{rank * ranks}"
        yield server


def gone(pid: int) -> bool:
    """Whether a process has ended (one that nobody has reaped yet has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
