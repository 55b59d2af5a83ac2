"""The fake shard keeps every promise that the real server is held to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.conformance import *  # noqa: F403
from router.fake_shard import FakeShard


@pytest.fixture(params=[False, True], ids=["whole", "chunked"])
async def shard_address(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    path = str(tmp_path / "shard-0")
    async with FakeShard(path, support_chunking=request.param, use_prefix_caching=request.param):
        yield path
