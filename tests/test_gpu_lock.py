"""One test that fills the GPU runs alone; others run side by side."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import gpu_lock


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "_FOLDER", tmp_path)


def test_tests_that_do_not_fill_it_run_side_by_side() -> None:
    together = threading.Barrier(3, timeout=30)

    def run() -> None:
        with gpu_lock.gpu_lock(fills=False):
            together.wait()

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(run) for _ in range(3)]:
            done.result(30)


def test_one_that_fills_it_waits_for_others_and_later_ones_wait_for_it() -> None:
    order: list[str] = []
    first, filling, leave = threading.Event(), threading.Event(), threading.Event()

    def shares() -> None:
        with gpu_lock.gpu_lock(fills=False):
            first.set()
            leave.wait(30)
            order.append("first")

    def fills() -> None:
        with gpu_lock.gpu_lock(fills=True):
            order.append("fills")

    def comes_later() -> None:
        with gpu_lock.gpu_lock(fills=False):
            order.append("later")

    def flock(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        # The second lock that is asked for exclusively is the room.
        if operation == gpu_lock.fcntl.LOCK_EX and threading.current_thread() is filler:
            filling.set()

    real = gpu_lock.fcntl.flock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_lock.fcntl, "flock", flock)
        sharer, filler = threading.Thread(target=shares), threading.Thread(target=fills)
        sharer.start()
        assert first.wait(30)
        filler.start()
        assert filling.wait(30)  # it has the gate
        later = threading.Thread(target=comes_later)
        later.start()
        leave.set()
        for thread in (sharer, filler, later):
            thread.join(30)
    assert order == ["first", "fills", "later"]
