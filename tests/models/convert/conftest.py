"""A folder for results, and conversions in this process."""

from __future__ import annotations

import pytest

from tokenpod.models.convert.job import Job, convert


@pytest.fixture
def convert_to(tmp_path):
    """Converts into a new folder, which it returns."""

    def run(source, **more):
        folder = tmp_path / "made"
        folder.mkdir()
        told = []
        done = convert(Job(str(source), str(folder), **more), lambda *at: told.append(at))
        assert told[-1][0] == told[-1][1] == done.bytes
        assert done.problem is None
        return folder

    return run
