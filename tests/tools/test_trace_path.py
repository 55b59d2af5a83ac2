"""The counter of files and classes on a request's way says the same of every call."""

from __future__ import annotations

import pytest
from trace_path import report, traced

from tokenpod.core.requests import Request


@pytest.mark.slow
def test_a_cold_and_a_warm_call_agree() -> None:
    cold, warm, again = traced("cpu")
    assert cold.keys() == warm.keys() == {"front end", "engine"}
    # What is computed once, at the first call; what a timer does while a slow machine takes one.
    for other in (cold, again):
        assert all(len(other[role].files ^ warm[role].files) <= 2 for role in warm)
    assert {"service/dialects/tokenpod_v1/codec.py", "core/requests.py"} <= warm["front end"].files
    engine = {"scheduler/planners/queue.py", "engine/loop.py", "core/requests.py"}
    assert engine <= warm["engine"].files
    carries = f"{Request.__module__}.{Request.__qualname__}"
    assert all(carries in run.classes for run in warm.values())
    counted = [line for line in report([cold, warm]) if line.startswith("together")]
    assert counted == [f"together: {len(warm['front end'].files | warm['engine'].files)} files"]
