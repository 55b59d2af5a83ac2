"""What a rank's process and its pod's front end say to each other, besides requests and tokens."""

from __future__ import annotations

from tokenpod.core.message import Message
from tokenpod.core.messages import Broken


class Pulse(Message, frozen=True, array_like=True, tag=True):
    """A rank's process is alive; sent several times a second, whatever else it does."""


class Waiting(Message, frozen=True, array_like=True, tag=True):
    """What the start-up of a group waits for; one line for the operator."""

    message: str


class Joined(Message, frozen=True, array_like=True, tag=True):
    """A follower has found its leader."""

    #: Where clients reach the leader's pod, as host:port.
    leader_address: str


class Drain(Message, frozen=True, array_like=True, tag=True):
    """A follower's pod asks the leader's to drain; as the answer: it has drained.

    Front ends of different pods send it to each other through their ranks.
    """

    #: The follower whose pod asks.
    rank: int


class Over(Message, frozen=True, array_like=True, tag=True):
    """The group ends, because another rank of this pod is lost; one line for the operator."""

    message: str


#: What travels on a rank's control stream, besides its link: see engine/shards/control_stream.py.
ToRank = Drain | Over
FromRank = Pulse | Waiting | Joined | Drain | Broken
