"""Where a rank stands in its group, and how it reaches the others."""

from __future__ import annotations

import msgspec


class ShardTls(msgspec.Struct, frozen=True, array_like=True):
    """Files (PEM) with which ranks of different pods know each other, both ways."""

    cert: str
    key: str
    ca: str


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """A rank's place in its group."""

    rank: int
    #: Ranks in all, at least 2.
    world: int
    #: Which of this pod's ranks, and so which of its GPUs.
    local_rank: int
    #: Where the leader's plans come from, as gRPC writes addresses: served by rank 0.
    plans: str
    #: Host and port where the ranks meet for collectives; port 0: the leader takes a free one.
    rendezvous: str
    rendezvous_port: int
    #: Where clients reach the leader's pod; for the leader, who tells the others.
    leader_address: str
    #: What the processes of one pod share; "" between pods.
    secret: str = ""
    #: Between pods: where followers find `plans`, by the address that they are given.
    found_at: str = ""
    tls: ShardTls | None = None
    #: Seconds that ranks wait for each other in a collective.
    timeout: float = 600.0
    #: Descriptor of the control stream to the pod's front end.
    control_fd: int = -1
