"""Helm for the chart's tests: one process for all of them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.helm import Helm


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("the Helm library is built for Linux on x86-64")
    engine = Helm()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def claims(request: pytest.FixtureRequest) -> Path:
    """A folder for persistent volume claims, which outlive the session: kernels stay compiled."""
    return request.config.cache.mkdir("claims")
