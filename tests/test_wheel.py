"""The wheel, as a user gets it: built from a checkout, installed, run from an empty folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ServerProcess, free_port

ROOT = Path(__file__).resolve().parent.parent
#: What is made in a checkout and must not be there when a wheel is built.
MADE = (".*", "*_pb2*", "*.egg-info", "__pycache__", "build", "dist", "node_modules")


def run(*command: object, cwd: Path, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a checkout without stubs or builds of an earlier day."""
    checkout = tmp_path_factory.mktemp("check out") / "tokenpod"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*MADE))
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", "dist"]
    run(sys.executable, "-P", "-m", "pip", "wheel", *options, ".", cwd=checkout)
    (built,) = (checkout / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Path:
    """The folder of programs of an environment with the wheel, and our dependencies."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    where = {"base": str(home), "platbase": str(home)}
    packages = Path(sysconfig.get_path("purelib", "venv", where))
    pip = [sys.executable, "-P", "-m", "pip", "--python", home / "bin" / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    # A path in a .pth file is added, but the .pth files there are not read: dependencies come
    # along, the editable install of this checkout does not.
    theirs = sysconfig.get_path("purelib")
    (packages / "dependencies.pth").write_text(theirs + "\n")
    return home / "bin"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An empty folder to work in."""
    return tmp_path


@pytest.fixture
def server(installed: Path, empty: Path) -> Iterator[ServerProcess]:
    """A server that the installed program runs."""
    port, health_port = free_port(), free_port()
    network = ["--hostname", "127.0.0.1", "--port", port, "--health-port", health_port]
    flags = [*map(str, network), "--threads", "1", "--lame-duck-seconds", "0"]
    log = empty / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(installed / "tokenpod"), "serve", *flags], cwd=empty, stderr=output, text=True
        )
    running = ServerProcess(process, port, health_port, "", log)
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        process.kill()
        process.wait()


def test_the_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "tokenpod/py.typed" in names
    assert "tokenpod/models/demo/model.safetensors" in names
    assert "tokenpod/models/demo/tokenizer.json" in names
    for version in ("v1", "v2", "v3"):
        folder = f"tokenpod/protos/generate/{version}"
        assert f"{folder}/generate.proto" in names
        assert f"{folder}/generate_pb2.py" in names
        assert f"{folder}/generate_pb2_grpc.py" in names
        assert f"{folder}/generate_pb2.pyi" in names
    assert "tokenpod/protos/tokenpod/v1/generation_service_pb2_grpc.py" in names
    assert "tokenpod/protos/tokenpod/v1/generation_service.proto" in names
    outside = {name for name in names if not name.startswith(("tokenpod/", "tokenpod-"))}
    assert not outside
    assert not {name for name in names if "/tests/" in name or "/tools/" in name}


def test_every_package_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = ("protos", "service", "scheduler", "engine", "kernels", "models")
    ours = {
        f"tokenpod/{path.relative_to(ROOT)}"
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    assert ours <= names


def test_the_installed_server_generates_from_an_empty_folder(
    installed: Path, server: ServerProcess, empty: Path
) -> None:
    flags = ["--address", server.address, "--max-new-tokens", "4"]
    done = run(installed / "tokenpod", "generate", "import ", *flags, cwd=empty)
    assert done.stdout.strip()
    assert done.stderr.startswith("[4 tokens; ")


def test_our_kernels_do_not_shadow_what_transformers_looks_for(
    installed: Path, empty: Path
) -> None:
    code = """
import sys, transformers
from importlib.util import find_spec
import tokenpod
assert "dependencies" not in tokenpod.__file__, tokenpod.__file__
assert find_spec("tokenpod.kernels") is not None
print(tokenpod.__file__)
print(find_spec("kernels"))
"""
    done = run(installed / "python", "-P", "-c", code, cwd=empty)
    where, kernels = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed.parent)
    assert kernels == "None"
