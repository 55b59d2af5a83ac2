"""One server on the embedded model for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import ServerProcess, serve


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A running server; tests must leave it as they found it."""
    with serve() as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="session")
def stub(server: ServerProcess) -> object:
    """A `generate.v3` stub."""
    return server.stub()
