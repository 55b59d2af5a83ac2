"""Calls that are ended by their names, though one of them fails to end."""

from __future__ import annotations

import pytest

from support.waiting import until
from tokenpod.service.admission.counters import NamedCalls, PodCounters


async def test_a_call_that_fails_to_end_keeps_no_other_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise OverflowError("a secret text")

    ended: list[str] = []
    counters = PodCounters.create(2, 8)
    calls = NamedCalls(counters.names)
    places = [calls.hold("bad", fail), calls.hold("good", lambda: ended.append("good"))]
    # Another front end asks for the end of both, then this one for what is left.
    counters.names.end("bad")
    counters.names.end("good")
    await until(lambda: bool(ended))
    assert ended == ["good"]
    assert "could not be ended" in caplog.text
    calls.end("bad")
    for place in places:
        assert place is not None
        calls.give_back(place)
