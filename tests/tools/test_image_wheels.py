"""What `make image` downloads: by hash, torch's CPU build from an index of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from image.wheels import fetch
from package_index import add_wheel, serve_index

NOWHERE = "http://127.0.0.1:1"


def entry(wheel: Path) -> str:
    """A lock's entry for a wheel."""
    name, version, *_ = wheel.name.split("-")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"


@pytest.fixture
def cpu_index(tmp_path: Path) -> Path:
    """The folder of an index of CPU builds, which is not the default one."""
    return tmp_path / "cpu"


@pytest.fixture
def locks(tmp_path: Path, default_index: Path, cpu_index: Path) -> Path:
    """Locks of wheels that are on the default index, but for torch."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    torch = add_wheel(cpu_index, "torch", "2.13.0+cpu")
    others = [add_wheel(default_index, name, "2.0") for name in ("numpy", "tqdm")]
    runtime = "".join(map(entry, [others[0], torch, others[1]]))
    (folder / "runtime-cpu.txt").write_text(f"# What a server needs.\n{runtime}")
    for name in ("build", "sbom"):
        (folder / f"{name}.txt").write_text(entry(add_wheel(default_index, name, "1.0")))
    return folder


@pytest.fixture
def served(cpu_index: Path) -> Iterator[str]:
    with serve_index(cpu_index) as address:
        yield address


def test_torch_comes_from_its_index_and_all_else_from_the_default_one(
    tmp_path: Path, locks: Path, served: str
) -> None:
    folder = fetch("cpu", locks, tmp_path / "wheels", served)
    names = [path.name.partition("-py3")[0] for path in sorted(folder.iterdir())]
    assert names == ["build-1.0", "numpy-2.0", "sbom-1.0", "torch-2.13.0+cpu", "tqdm-2.0"]


def test_a_wheel_that_is_there_is_enough(tmp_path: Path, locks: Path, cpu_index: Path) -> None:
    (wheel,) = (cpu_index / "torch").iterdir()
    (tmp_path / "wheels").mkdir()
    wheel.rename(tmp_path / "wheels" / wheel.name)
    assert len(list(fetch("cpu", locks, tmp_path / "wheels", NOWHERE).iterdir())) == 5


def test_pips_own_settings_are_enough(
    tmp_path: Path, locks: Path, served: str, pip_settings: pytest.MonkeyPatch
) -> None:
    pip_settings.setenv("PIP_EXTRA_INDEX_URL", served)
    assert len(list(fetch("cpu", locks, tmp_path / "wheels", "").iterdir())) == 5


@pytest.mark.parametrize("index", ["", NOWHERE])
def test_a_torch_that_is_nowhere_is_named_with_the_variable(
    tmp_path: Path, locks: Path, index: str
) -> None:
    with pytest.raises(
        SystemExit, match=r"^torch==2\.13\.0\+cpu was not found .*TORCH_INDEX=URL"
    ) as e:
        fetch("cpu", locks, tmp_path / "wheels", index)
    assert index in str(e.value)


def test_a_torch_with_another_hash_is_refused(
    tmp_path: Path, locks: Path, cpu_index: Path, served: str
) -> None:
    (wheel,) = (cpu_index / "torch").iterdir()
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(SystemExit, match=r"^torch==2\.13\.0\+cpu was not found"):
        fetch("cpu", locks, tmp_path / "wheels", served)
    assert not list((tmp_path / "wheels").iterdir())
