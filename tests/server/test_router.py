"""The shard protocol on a real server: the router double's whole conformance suite."""

from __future__ import annotations

import pytest

from router.conformance import *  # noqa: F403
from support.pods.harness import ServerProcess


@pytest.fixture(scope="module")
def shard_address(server: ServerProcess) -> str:
    """The unix socket that a router on this machine would open."""
    return server.uds
