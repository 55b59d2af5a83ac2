"""pip as the tools call it, with settings of its own and none of the machine's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.outside.package_index import serve_index


@pytest.fixture
def pip_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sets variables of pip, which starts with its defaults; proxies don't see its requests."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return monkeypatch


@pytest.fixture
def default_index(tmp_path: Path, pip_settings: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the index that pip asks when no other is named."""
    folder = tmp_path / "default"
    folder.mkdir()
    with serve_index(folder) as address:
        pip_settings.setenv("PIP_INDEX_URL", address)
        yield folder
