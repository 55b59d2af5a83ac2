"""`make setup INSTALLER=uv` installs by uv what pip would, or leaves it to pip."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest

from support.outside.package_index import add_wheel

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "install_by_uv.sh"
UV = distribution("uv")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An environment that has pip and uv, and nothing else of its own."""
    home = tmp_path / ".venv"
    venv.create(home, with_pip=False, symlinks=True)
    (folder(home) / "dependencies.pth").write_text(f"{UV.locate_file('')}\n")
    (home / "bin" / "uv").symlink_to(Path(sys.prefix) / "bin" / "uv")
    return home


def folder(home: Path) -> Path:
    where = {"base": str(home), "platbase": str(home)}
    return Path(sysconfig.get_path("purelib", "venv", where))


@pytest.fixture
def install(tmp_path: Path, home: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script with a lock of these packages."""

    def run(*packages: str) -> subprocess.CompletedProcess[str]:
        lock = tmp_path / "dev.txt"
        lock.write_text("\n".join([*packages, f"uv=={UV.version}\n"]))
        command = ["sh", str(SCRIPT), str(lock), str(home / "bin" / "python")]
        return subprocess.run(command, capture_output=True, text=True, timeout=200)

    return run


def test_the_index_of_pips_settings_is_asked_and_nothing_is_left(
    default_index: Path, home: Path, install
) -> None:
    add_wheel(default_index, "first", "1.0", requires=["second"])
    for name, version in (("first", "1.1"), ("second", "2.0"), ("uv", UV.version)):
        add_wheel(default_index, name, version)
    done = install("first==1.0")
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    versions = {each.name: each.version for each in distributions(path=[str(folder(home))])}
    assert versions == {"first": "1.0", "second": "2.0", "uv": UV.version}
    assert not list(home.glob(".uv*"))


def test_what_uv_cannot_do_is_left_to_pip(default_index: Path, pip_settings, home, install) -> None:
    failed = install("first==1.0")
    assert failed.returncode == 1
    assert failed.stdout == "uv failed: pip installs\n"
    assert not list(home.glob(".uv*"))
    pip_settings.setenv("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:1")
    unknown = install("first==1.0")
    assert unknown.returncode == 1
    assert unknown.stdout.endswith("nothing of pip's settings: :env:.extra-index-url\n")
