"""`make setup` takes torch's CPU build where it can, and says what it took."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch_build
from package_index import add_wheel, serve_index
from torch_build import (
    CPU_BUILDS,
    has_driver,
    index_to_try,
    pinned,
    refusal,
    shown,
    weight,
)

#: pip starts twice for another environment, on a machine that is busy with other tests.
install = functools.partial(torch_build.install, seconds=100)


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


@pytest.mark.parametrize("path", ["dev/nvidiactl", "proc/driver/nvidia/version"])
def test_a_driver_is_found_by_its_files(tmp_path: Path, path: str) -> None:
    assert not has_driver(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert has_driver(tmp_path)


@pytest.mark.parametrize(
    ("environ", "driver", "index"),
    [
        ({}, False, CPU_BUILDS),
        ({}, True, ""),
        ({"TORCH_INDEX": ""}, False, ""),
        ({"TORCH_INDEX": "https://mirror/cpu"}, False, "https://mirror/cpu"),
        ({"TORCH_INDEX": "https://mirror/cu130"}, True, "https://mirror/cu130"),
    ],
)
def test_the_index_is_the_one_named_or_else_that_of_the_machine(
    environ: dict[str, str], driver: bool, index: str
) -> None:
    assert index_to_try(environ, driver=driver) == index


def test_an_address_is_shown_without_its_password() -> None:
    assert shown("https://me:secret@mirror:8443/cpu") == "https://mirror:8443/cpu"


def test_the_version_is_that_of_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "dev.txt"
    lock.write_text("tokenizers==1.0\ntorch==2.13.0\ntorchvision==0.28.0\n")
    assert pinned(lock) == "2.13.0"
    lock.write_text("tokenizers==1.0\n")
    with pytest.raises(SystemExit, match=r"dev\.txt has no torch"):
        pinned(lock)


def test_torch_alone_comes_from_the_index(
    tmp_path: Path, default_index: Path, pip: list[str], packages: Callable[[], dict[str, str]]
) -> None:
    for version in ("2.12.0+cpu", "2.13.0+cpu", "2.14.0+cpu"):
        add_wheel(tmp_path / "cpu", "torch", version, requires=["filelock"])
    add_wheel(tmp_path / "cpu", "filelock", "1.0")
    add_wheel(default_index, "torch", "2.13.0")
    with serve_index(tmp_path / "cpu") as index:
        assert install("2.13.0", None, index, pip) == f"torch 2.13.0 came from {index}"
    assert packages() == {"torch": "2.13.0+cpu"}


def test_the_locked_dependencies_leave_that_torch_where_it_is(
    tmp_path: Path, default_index: Path, pip: list[str], packages: Callable[[], dict[str, str]]
) -> None:
    add_wheel(tmp_path / "cpu", "torch", "2.13.0+cpu")
    add_wheel(default_index, "torch", "2.13.0", requires=["cuda"])
    add_wheel(default_index, "numpy", "2.0")
    with serve_index(tmp_path / "cpu") as index:
        install("2.13.0", None, index, pip)
    subprocess.run([*pip, "install", "-qq", "torch==2.13.0", "numpy==2.0"], check=True)
    assert packages() == {"torch": "2.13.0+cpu", "numpy": "2.0"}


@pytest.mark.parametrize("there", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_a_torch_of_that_version_is_not_fetched_again(there: str) -> None:
    said = install("2.13.0", there, "http://127.0.0.1:1", pip=["false"])
    assert said == f"torch {there} is installed already"


def test_a_torch_of_another_version_is_replaced(
    tmp_path: Path,
    pip_settings: pytest.MonkeyPatch,
    pip: list[str],
    packages: Callable[[], dict[str, str]],
) -> None:
    add_wheel(tmp_path / "cpu", "torch", "2.12.0+cpu")
    add_wheel(tmp_path / "cpu", "torch", "2.13.0+cpu")
    with serve_index(tmp_path / "cpu") as index:
        subprocess.run([*pip, "install", "-qq", "--index-url", index, "torch==2.12.0"], check=True)
        install("2.13.0", "2.12.0+cpu", index, pip)
    assert packages() == {"torch": "2.13.0+cpu"}


def test_no_index_is_asked_where_none_is_named() -> None:
    said = install("2.13.0", None, "", pip=["false"])
    assert said == "torch 2.13.0 comes from the default index"


def test_an_index_without_the_version_is_named_and_left(
    tmp_path: Path,
    pip_settings: pytest.MonkeyPatch,
    pip: list[str],
    packages: Callable[[], dict[str, str]],
) -> None:
    add_wheel(tmp_path / "cpu", "torch", "2.13.1+cpu")
    with serve_index(tmp_path / "cpu") as index:
        said = install("2.13.0", None, index, pip)
    assert said.startswith(f"{index} can't be reached, or has no torch 2.13.0 for this Python. ")
    assert "torch 2.13.0 comes from the default index instead" in said
    assert "TORCH_INDEX=URL" in said
    assert packages() == {}


def test_an_index_that_has_only_a_broken_wheel_is_left(
    tmp_path: Path,
    pip_settings: pytest.MonkeyPatch,
    pip: list[str],
    packages: Callable[[], dict[str, str]],
) -> None:
    add_wheel(tmp_path / "cpu", "torch", "2.13.0+cpu").write_bytes(b"half a download")
    with serve_index(tmp_path / "cpu") as index:
        said = install("2.13.0", None, index, pip)
    assert said.startswith(f"{index} could not be used: pip ended with status ")
    assert packages() == {}


def test_an_index_that_is_not_there_is_refused(pip_settings: pytest.MonkeyPatch) -> None:
    problem = refusal("http://127.0.0.1:1", "2.13.0", seconds=100)
    assert problem == "can't be reached, or has no torch 2.13.0 for this Python"


def test_an_index_that_says_nothing_costs_no_more_than_the_limit(
    pip_settings: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        # Less than pip itself takes to start: it is the limit that ends the try.
        problem = refusal(f"http://127.0.0.1:{port}", "2.13.0", seconds=0.1)
    assert problem == "did not answer within 0.1 s"


def test_what_was_taken_is_weighed(
    tmp_path: Path, default_index: Path, environment: Path, pip: list[str]
) -> None:
    add_wheel(default_index, "torch", "2.13.0")
    add_wheel(default_index, "nvidia_cublas", "13.1")
    subprocess.run([*pip, "install", "-qq", "torch"], check=True)
    assert weight(environment) == ".venv takes 0.0 GB, torch 2.13.0 0.0 GB of that"
    subprocess.run([*pip, "install", "-qq", "nvidia_cublas"], check=True)
    (package,) = environment.glob("lib/python3*/site-packages/nvidia_cublas")
    with (package / "__init__.py").open("r+b") as library:
        library.truncate(1_500_000_000)
    assert weight(environment) == (
        ".venv takes 1.5 GB, torch 2.13.0 and CUDA's libraries 1.5 GB of that"
    )
