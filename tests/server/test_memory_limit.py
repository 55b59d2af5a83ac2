"""A server under a memory limit of the kernel's own, of either version of cgroups."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clients.public_api import generate, text_request
from support.pods.harness import serve
from support.waiting import wait_for

MIB = 1 << 20
#: Below what a pool for the default limits would take, above what the processes do.
LIMIT = 1536 * MIB


def _folders() -> list[tuple[Path, str]]:
    """Where a cgroup with a memory limit could be made, and the name of the limit's file."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in own}
    root = Path("/sys/fs/cgroup")
    return [
        (root / "memory" / paths.get("memory", ""), "memory.limit_in_bytes"),
        (root / paths.get("", ""), "memory.max"),
    ]


def _moved(processes: Path) -> bool:
    """Whether this process could be put there."""
    try:
        processes.write_text(str(os.getpid()))
    except OSError:
        return False
    return True


def _removed(folder: Path) -> bool:
    folder.rmdir()
    return True


@pytest.fixture
def limited() -> Iterator[None]:
    """This process, and so its children, in a cgroup with the limit; skips where that can't be."""
    for parent, name in _folders():
        folder = parent / f"tokenpod-test-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / name).write_text(str(LIMIT))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        if not _moved(folder / "cgroup.procs"):
            folder.rmdir()
            continue
        yield
        assert _moved(parent / "cgroup.procs")
        # What has ended leaves it a moment later.
        wait_for(functools.partial(_removed, folder))
        return
    pytest.skip("this user can't make a cgroup with a memory limit")


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
@pytest.mark.usefixtures("limited")
def test_the_pool_fits_under_the_limit_and_the_log_says_so() -> None:
    # Ten times what fits could be used.
    # A process that is in the group from its start on.
    with serve("--max-batch-size", "512", own_imports=True) as server:
        limit = r"under the limit .* less .* that a load takes, 8\.0 KiB"
        said = rf'kv_slots=(\d+) kv_slots_from="90% .* {limit}'
        # It is said a moment after the pod serves.
        found = wait_for(lambda: re.search(said, server.log.read_text()), log=server.log)
        assert int(found[1]) * 8192 < LIMIT
        request = text_request("def f(", stopping={"max_new_tokens": 4})
        assert generate(server.stub(), request).samples[0].finished
        assert server.stop() == 0
