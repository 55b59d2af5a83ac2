"""What the log says while a model is loaded."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tokenpod.core.messages import Loading
from tokenpod.service.pod import progress
from tokenpod.service.pod.progress import LoadingBar


async def test_lines_tell_what_is_done_and_how_far_it_has_come(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)
    caplog.set_level(logging.INFO, "tokenpod")
    bar = LoadingBar("org/name")
    telling = asyncio.create_task(bar.tell())

    async def next_line() -> dict[str, object]:
        caplog.clear()
        for _ in range(1000):
            if caplog.records:
                break
            await asyncio.sleep(0.005)
        assert caplog.messages[-1] == "loading"
        return vars(caplog.records[-1])

    line = await next_line()
    assert (line["model_id"], line["stage"]) == ("org/name", "starting the engine")
    bar.update(Loading(3 << 30, 12 << 30))
    line = await next_line()
    assert (line["stage"], line["percent"]) == ("reading weights", 25)
    assert (line["done_bytes"], line["total_bytes"]) == (3 << 30, 12 << 30)
    bar.update(Loading(12 << 30, 12 << 30))
    assert (await next_line())["stage"] == "warming up"
    telling.cancel()
    bar.close()
