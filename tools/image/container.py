"""An image run as Kubernetes' restricted profile has it.

A user without privileges or capabilities, a root folder that can't be written to, no network but
its own loopback, and processes that see nobody else's.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image.commands import read

#: crun knows no machine that has both generations of control groups: it is shown the newer one.
_ONE_GENERATION = "mountpoint -q /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup;"
START_SECONDS = 120

_CRUN = ("crun", "--cgroup-manager=disabled")


@dataclass(frozen=True)
class Container:
    """A container that runs."""

    name: str
    process: subprocess.Popen[str]
    #: `user:group`, as numbers.
    user: str

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside the server, as its user."""
        inside = [*_CRUN, "exec", "--user", self.user, self.name, *command]
        return _beside(inside, capture_output=True, text=True)

    def wait_until_healthy(self, check: list[str]) -> float:
        """Seconds until the image's own check is content. Raises SystemExit if it never is."""
        began = time.monotonic()
        while time.monotonic() - began < START_SECONDS:
            if self.process.poll() is not None:
                raise SystemExit(f"the container ended with status {self.process.returncode}")
            if self.run(*check).returncode == 0:
                return time.monotonic() - began
            time.sleep(0.2)
        raise SystemExit(f"the container was not healthy within {START_SECONDS} s")

    def stop(self) -> int:
        """SIGTERM to its first process; that one's exit status."""
        read(*_CRUN, "kill", self.name, "TERM")
        return self.process.wait(60)


@contextlib.contextmanager
def running(root: Path, config: dict[str, Any], writable: list[str]) -> Iterator[Container]:
    """Start what an image starts; killed in the end if it still runs.

    Args:
        root: the image's root folder.
        config: the image's configuration, as Docker has it.
        writable: folders that get an empty volume each.
    """
    name = f"tokenpod-{time.time_ns()}"
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch)
        told = bundle_of(root, config, writable)
        # As every platform has it: a host knows its own name.
        hosts = f"127.0.0.1 localhost {told['hostname']}\n::1 localhost\n"
        (bundle / "hosts").write_text(hosts)
        told["mounts"].append(_mount("/etc/hosts", "bind", "bind", "ro", source=bundle / "hosts"))
        (bundle / "config.json").write_text(json.dumps(told))
        process = _start([*_CRUN, "run", "--bundle", scratch, name])
        try:
            yield Container(name, process, config["User"])
        finally:
            if process.poll() is None:
                subprocess.call([*_CRUN, "kill", name, "KILL"])
                process.wait(30)


def bundle_of(root: Path, config: dict[str, Any], writable: list[str]) -> dict[str, Any]:
    """What an OCI runtime is told; see the runtime specification."""
    user, _, group = config["User"].partition(":")
    if not (user.isdigit() and int(user) and group.isdigit()):
        raise SystemExit(f"the image's user is {config['User']!r}: numbers other than 0 are needed")
    volumes = [_mount(path, "tmpfs", "nosuid", "nodev", "mode=1777") for path in writable]
    kinds = ("pid", "network", "ipc", "uts", "mount")
    return {
        "ociVersion": "1.0.0",
        "root": {"path": str(root), "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": int(user), "gid": int(group)},
            "args": [*config["Entrypoint"], *config["Cmd"]],
            "env": config["Env"],
            "cwd": config["WorkingDir"],
            "noNewPrivileges": True,
            "capabilities": {},
        },
        "hostname": "tokenpod-0",
        "mounts": [
            _mount("/proc", "proc"),
            _mount("/dev", "tmpfs", "nosuid", "mode=755"),
            _mount("/dev/shm", "tmpfs", "nosuid", "nodev", "noexec", "mode=1777"),
            *volumes,
        ],
        "linux": {"namespaces": [{"type": kind} for kind in kinds]},
    }


def _mount(path: str, kind: str, *options: str, source: object = None) -> dict[str, Any]:
    given = str(source or kind)
    return {"destination": path, "type": kind, "source": given, "options": list(options)}


def _own_mounts(command: list[str]) -> list[str]:
    """The command, where mounts are nobody else's."""
    return ["unshare", "--mount", "sh", "-c", f'{_ONE_GENERATION} exec "$@"', "sh", *command]


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(_own_mounts(command), text=True)


def _beside(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_own_mounts(command), **options)
