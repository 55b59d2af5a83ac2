"""The shard protocol on a real server: the router double's whole conformance suite."""

from __future__ import annotations

import pytest

from router.conformance import *  # noqa: F403
from support.pods.harness import ServerProcess

#: Each promise in one generation of the protocol, in another one from promise to promise.
pytestmark = pytest.mark.sampled(4, "slow", by_turns=True)


@pytest.fixture(scope="module")
def shard_address(server: ServerProcess) -> str:
    """The unix socket that a router on this machine would open."""
    return server.uds
