"""`make setup` takes torch's CPU build where it can, and says what it took."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from support.outside.package_index import add_wheel, serve_index

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "install_torch.sh"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An empty virtual environment."""
    home = tmp_path / ".venv"
    venv.create(home, with_pip=False, symlinks=True)
    return home


@pytest.fixture
def pip(environment: Path) -> list[str]:
    """pip, for the empty environment."""
    return [sys.executable, "-P", "-m", "pip", "--python", str(environment / "bin" / "python")]


@pytest.fixture
def packages(environment: Path) -> Callable[[], dict[str, str]]:
    """Asks for the versions of what is in the environment."""
    where = {"base": str(environment), "platbase": str(environment)}
    folder = sysconfig.get_path("purelib", "venv", where)
    return lambda: {each.name: each.version for each in distributions(path=[folder])}


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., str]:
    """Runs the script with a lock of torch 2.13.0; what it says."""

    def run(pip: list[str], index: str | None = None, root: Path = tmp_path / "driverless") -> str:
        lock = tmp_path / "dev.txt"
        lock.write_text("tokenizers==1.0\ntorch==2.13.0\ntorchvision==0.28.0\n")
        variables = {**os.environ, "DRIVER_ROOT": str(root)}
        variables.pop("TORCH_INDEX", None)
        if index is not None:
            variables["TORCH_INDEX"] = index
        done = subprocess.run(
            ["sh", SCRIPT, lock, *pip], env=variables, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("path", ["dev/nvidiactl", "proc/driver/nvidia/version"])
def test_with_a_driver_torch_is_left_to_the_default_index(tmp_path: Path, install, path) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert install(["false"], root=tmp_path) == "torch==2.13.0 comes from the default index"
    assert install(["true"], "http://mirror/cu130", root=tmp_path).endswith("http://mirror/cu130")


def test_without_a_driver_the_index_of_cpu_builds_is_asked_for_torch_alone(install) -> None:
    said = install(["echo"])
    assert "--no-deps" in said
    assert "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0\n" in said


def test_an_empty_variable_asks_no_index(install) -> None:
    assert install(["false"], "") == "torch==2.13.0 comes from the default index"


def test_an_address_is_shown_without_its_password(install) -> None:
    said = install(["true"], "https://me:secret@mirror:8443/cpu")
    assert said == "torch==2.13.0 is there, or came from https://mirror:8443/cpu"


def test_torch_alone_comes_from_the_index_and_the_other_dependencies_leave_it(
    tmp_path: Path, default_index: Path, install, pip: list[str], packages
) -> None:
    for version in ("2.12.0+cpu", "2.13.0+cpu", "2.14.0+cpu"):
        add_wheel(tmp_path / "cpu", "torch", version, requires=["filelock"])
    add_wheel(default_index, "torch", "2.13.0", requires=["cuda"])
    for name, version in (("numpy", "2.0"), ("filelock", "1.0")):
        add_wheel(default_index, name, version)
    with serve_index(tmp_path / "cpu") as index:
        assert install(pip, index) == f"torch==2.13.0 is there, or came from {index}"
    assert packages() == {"torch": "2.13.0+cpu"}
    subprocess.run([*pip, "install", "-qq", "torch==2.13.0", "numpy==2.0"], check=True)
    assert packages() == {"torch": "2.13.0+cpu", "numpy": "2.0", "filelock": "1.0"}
    # What is there stays: no index is asked again.
    assert "is there" in install(pip, "http://127.0.0.1:1")


def test_an_index_without_the_version_or_with_a_broken_wheel_is_named_and_left(
    tmp_path: Path, pip_settings, install, pip: list[str], packages
) -> None:
    add_wheel(tmp_path / "cpu", "torch", "2.13.1+cpu")
    with serve_index(tmp_path / "cpu") as index:
        said = install(pip, index)
        assert said.startswith(f"torch==2.13.0 can't be had from {index}: it comes from the def")
        add_wheel(tmp_path / "cpu", "torch", "2.13.0+cpu").write_bytes(b"half a download")
        assert install(pip, index) == said
    assert "TORCH_INDEX=URL" in said
    assert packages() == {}


def test_an_index_that_says_nothing_is_left(pip_settings, install, pip: list[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        said = install(pip, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "can't be had from http://127.0.0.1:" in said
