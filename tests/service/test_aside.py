"""Work of calls beside the event loop: a few threads of its own, and a bounded line."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tokenpod.service.admission.aside import Aside
from tokenpod.service.calls.errors import ResourceExhausted


class Slow:
    """Work that waits until a test lets it go on."""

    def __init__(self) -> None:
        self.go_on, self.begun = threading.Event(), threading.Event()
        self.runs = 0

    def __call__(self) -> str:
        self.runs += 1
        self.begun.set()
        assert self.go_on.wait(60)
        return threading.current_thread().name


async def under_way(slow: Slow, aside: Aside, count: int) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(aside.run(slow)) for _ in range(count)]
    await asyncio.sleep(0)
    assert await asyncio.to_thread(slow.begun.wait, 60)
    return tasks


async def test_more_than_may_wait_is_refused_at_once_with_a_hint() -> None:
    slow, aside = Slow(), Aside(most=3)
    tasks = await under_way(slow, aside, 3)
    with pytest.raises(ResourceExhausted) as refused:
        await aside.run(slow)
    assert refused.value.retry_after == 1.0
    slow.go_on.set()
    assert all(name.startswith("aside") for name in await asyncio.gather(*tasks))
    assert (await aside.run(slow)).startswith("aside")


async def test_what_waits_takes_no_thread_of_others() -> None:
    slow, aside = Slow(), Aside()
    tasks = await under_way(slow, aside, 100)
    name = await asyncio.to_thread(threading.current_thread)
    assert not name.name.startswith("aside")
    slow.go_on.set()
    await asyncio.gather(*tasks)


async def test_a_caller_that_leaves_makes_room_and_its_work_is_not_done() -> None:
    slow, aside = Slow(), Aside(most=8)
    tasks = await under_way(slow, aside, 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    more = [asyncio.create_task(aside.run(slow)) for _ in range(8)]
    slow.go_on.set()
    await asyncio.gather(*more)
    assert slow.runs <= 8 + 2, "no more than had begun"


async def test_what_work_raises_is_the_callers() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Aside().run(fails)
