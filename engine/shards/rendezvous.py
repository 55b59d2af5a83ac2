"""How ranks find each other: all connect to rank 0, which counts them."""

from __future__ import annotations

import ipaddress
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from tokenpod.core.errors import EngineError, RankLost

#: Between attempts to reach rank 0, which may start later.
_RETRY_SECONDS = 0.1
#: For one attempt, and for one question to a store that is there.
_ANSWER_SECONDS = 5.0


def open_store(rank: int, world: int, address: str, port: int, *, timeout: float) -> TCPStore:
    """Wait until all ranks are there; see `join_group`.

    Returns:
        What they all can write to and read from; rank 0 holds it.
    """
    deadline = time.monotonic() + timeout
    where = f"{address}:{port}"
    try:
        if rank == 0:
            store = _open(address, port, world, timeout)
            store.set("world", str(world))
        else:
            _await_listener(rank, address, port, deadline)
            store = TCPStore(address, port, None, False, timedelta(seconds=_left(deadline)))
            _check_world(store, rank, world, where, deadline)
        if store.add(f"rank {rank}", 1) > 1:
            raise EngineError(
                f"two processes say that they are rank {rank} of the group at {where}"
            )
        _await_all(store, rank, world, where, deadline)
    except DistError as error:
        raise RankLost(f"rank {rank} lost rank 0 at {where}: {one_line(error)}") from None
    return store


def one_line(error: BaseException) -> str:
    """The beginning of a library's message, without its traces."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _open(address: str, port: int, world: int, timeout: float) -> TCPStore:
    """Listen, to this host only if `address` means it."""
    try:
        local = str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
        host = local if ipaddress.ip_address(local).is_loopback else ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if not host and socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise EngineError(f"rank 0 can't listen at {address}:{port}: {error.strerror}") from None
    return TCPStore(
        address,
        port,
        world,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _await_listener(rank: int, address: str, port: int, deadline: float) -> None:
    """The library would retry too, and tell the log about every attempt."""
    while True:
        try:
            socket.create_connection((address, port), min(_left(deadline), _ANSWER_SECONDS)).close()
            return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                reason = error.strerror or str(error)
                raise RankLost(
                    f"rank {rank} can't reach rank 0 at {address}:{port}: {reason}"
                ) from None
        time.sleep(_RETRY_SECONDS)


def _check_world(store: TCPStore, rank: int, world: int, where: str, deadline: float) -> None:
    store.wait(["world"], timedelta(seconds=_left(deadline)))
    others = int(store.get("world"))
    if others != world:
        raise EngineError(
            f"rank {rank} is one of {world}, but rank 0 at {where} leads a group of {others}"
        )


def _await_all(store: TCPStore, rank: int, world: int, where: str, deadline: float) -> None:
    keys = [f"rank {other}" for other in range(world)]
    try:
        store.wait(keys, timedelta(seconds=_left(deadline)))
    except DistError:
        missing = [key for key in keys if not store.check([key])]
        if not missing:
            raise
        raise RankLost(
            f"{', '.join(missing)} of {world} did not come to rank 0 at {where} in time"
        ) from None


def _left(deadline: float) -> float:
    """Seconds, at least a moment."""
    return max(deadline - time.monotonic(), 0.1)
