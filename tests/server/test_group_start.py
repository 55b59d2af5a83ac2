"""Groups that can't form: one clear line on every rank within the start timeout, and no orphan."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints.demo import DEMO
from support.pods import prefork
from support.pods.groups import FLAGS, gone
from support.pods.harness import free_port

#: Those who wait in vain do so until it is over.
IN_VAIN = 25
#: Those who find each other, and wait for one of them to be put right: all of it, but long enough
#: to find each other where many start at once.
IN_TIME = 60
SLACK = 60


class Pod:
    """A pod that is expected to fail."""

    def __init__(self, flags: dict[str, object]) -> None:
        usual = {"--hostname": "127.0.0.1", "--port": 0, "--health-port": 0}
        usual |= {"--start-timeout": IN_TIME, "--master-addr": "127.0.0.1"}
        self.flags = usual | flags
        parts = [str(part) for pair in self.flags.items() for part in pair]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        errors = self._errors.fileno()
        self.process = prefork.start(["serve", *FLAGS, *parts], stdout=errors, stderr=errors)
        self._began = time.monotonic()
        self.errors: str | None = None
        self._children: set[int] = set()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def plans(self) -> str:
        return f"127.0.0.1:{self.flags['--shard-port']}"

    def line(self) -> str:
        """The one line that it ends with, in time."""
        self.process.wait(float(str(self.flags["--start-timeout"])) + SLACK)
        self._errors.seek(0)
        errors = self._errors.read()
        self._watcher.join()
        assert self.process.returncode == 1, errors
        assert "Traceback" not in errors
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, errors
        assert self._children
        assert all(gone(pid) for pid in self._children)
        return lines[0]

    def _watch(self) -> None:
        """Note its children for as long as it lives."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                self._children |= {int(pid) for pid in listed.read_text().split()}
            time.sleep(0.1)


def group(*ranks: int, **flags: object) -> list[Pod]:
    """Pods of one group of two; a flag that is a list has a value for each pod."""
    ports = {"--master-port": free_port(), "--shard-port": free_port(), "--num-nodes": 2}
    pods = []
    for at, rank in enumerate(ranks):
        named = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        mine = {
            name: value[at] if isinstance(value, list) else value for name, value in named.items()
        }
        pods.append(Pod(ports | {"--node-rank": rank} | mine))
    return pods


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Pod]]]:
    """Every group of this page: they fail side by side."""
    other = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("models") / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    pods = {
        "follower alone": group(1, start_timeout=IN_VAIN),
        "leaders here": group(0, 0, start_timeout=IN_VAIN),
        "models": group(0, 1, model_id=["demo", other], max_batch_size=[8, 9]),
        # As two machines would have them: the same port, on addresses of their own.
        "leaders": group(0, 0, hostname=["127.0.0.1", "127.0.0.2"]),
    }
    yield pods
    for pod in (pod for each in pods.values() for pod in each):
        if pod.process.poll() is None:
            pod.process.kill()


@pytest.mark.usefixtures("groups")
def test_a_world_that_the_model_cannot_be_divided_into_is_named() -> None:
    line = Pod({"--num-shard": 3}).line()
    assert "3 ranks" in line
    assert "heads" in line


def test_a_leader_that_does_not_come_is_named_with_its_address(
    groups: dict[str, list[Pod]],
) -> None:
    (follower,) = groups["follower alone"]
    assert f"waiting for the leader at {follower.plans}: nobody listens there" in follower.line()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("models", "max_batch_size is 8 at the leader and 9 at rank 1"),
        ("models", "config.json is "),
        ("leaders", "there are two leaders"),
    ],
)
def test_what_differs_is_named_by_every_pod(
    groups: dict[str, list[Pod]], name: str, said: str
) -> None:
    for pod in groups[name]:
        assert said in pod.line()


def test_two_leaders_on_one_machine_are_told_by_their_port(groups: dict[str, list[Pod]]) -> None:
    lines = sorted(pod.line() for pod in groups["leaders here"])
    assert f"cannot listen on {groups['leaders here'][0].plans} (--shard-port)" in lines[0]
    assert "waiting for rank 1 of 2" in lines[1]
