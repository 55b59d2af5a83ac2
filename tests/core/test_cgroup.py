"""Which memory limits are seen, of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenpod.core.cgroup import MemoryLimit, memory_limits

MIB = 1 << 20
#: Files of a limit and of what is used, by version.
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
#: The line of /proc/self/cgroup that names the memory hierarchy.
LINES = {1: "4:memory:{}", 2: "0::{}"}


class Tree:
    """A mount of cgroups of one version, in a folder."""

    def __init__(self, scratch: Path, version: int) -> None:
        self.root, self.own, self.version = scratch / "cgroup", scratch / "own", version

    def put(self, path: str, limit: object, used: int, idle_files: int = 0) -> None:
        base = self.root / "memory" if self.version == 1 else self.root
        folder = base / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(NAMES[self.version], (limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
        # Version 1 has the same numbers without those of the cgroups below, under these names.
        own, whole = ("", "total_") if self.version == 1 else ("own_", "")
        statistics = (
            f"{own}inactive_file 1",
            "active_file 7",
            f"{whole}inactive_file {idle_files}",
        )
        (folder / "memory.stat").write_text("\n".join(statistics) + "\n")

    def limits(self, path: str) -> list[MemoryLimit]:
        lines = ["9:name=systemd:/", "3:cpu,cpuacct:/x", LINES[self.version].format(path)]
        self.own.write_text("\n".join(lines) + "\n")
        return memory_limits(self.root, self.own)


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    return Tree(tmp_path, request.param)


def test_a_container_that_sees_its_own_cgroup_at_the_root_knows_its_limit(tree: Tree) -> None:
    tree.put("/", 512 * MIB, 100 * MIB)
    # Without a namespace of its own, the path is the node's.
    for path in ("/", "/kubepods/burstable/pod1/abc"):
        (limit,) = tree.limits(path)
        assert (limit.limit, limit.left, limit.version) == (512 * MIB, 412 * MIB, tree.version)


def test_limits_of_all_levels_count_and_the_tightest_comes_first(tree: Tree) -> None:
    tree.put("/", 4096 * MIB, 4000 * MIB)
    tree.put("/pods", 2048 * MIB, 1000 * MIB)
    tree.put("/pods/one", 512 * MIB, 100 * MIB)
    tree.put("/pods/other", 64 * MIB, 64 * MIB)
    assert [limit.left // MIB for limit in tree.limits("/pods/one")] == [96, 412, 1048]


@pytest.mark.parametrize("none", ["max", 2**63 - 4096])
def test_no_limit_is_none(tree: Tree, none: object) -> None:
    if none == "max" and tree.version == 1:
        pytest.skip("version 1 writes a number")
    tree.put("/", none, 5)
    assert tree.limits("/") == []


def test_more_used_than_allowed_leaves_nothing(tree: Tree) -> None:
    tree.put("/", MIB, 2 * MIB)
    assert tree.limits("/")[0].left == 0


def test_files_that_were_read_once_take_nothing_from_anybody(tree: Tree) -> None:
    tree.put("/", 512 * MIB, 511 * MIB, idle_files=300 * MIB)
    (limit,) = tree.limits("/")
    assert (limit.limit, limit.left) == (512 * MIB, 301 * MIB)


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limits(tmp_path / "none", tmp_path / "nothing") == []
