"""The wheels, as users get them: built from a checkout, installed, run from an empty folder."""

from __future__ import annotations

import ast
import email
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.pods.harness import ServerProcess, free_port

pytestmark = pytest.mark.pod

ROOT = Path(__file__).resolve().parent.parent
#: The folders of the projects, by the packages that they build.
PROJECTS = {"tokenpod": ".", "tokenpod_client": "client"}
#: What is made in a checkout, and what its packages hold that no wheel has.
LEFT_OUT = (".*", "*_pb2*", "*.egg-info", "__pycache__", "baseline.binpb")


def run(*command: object, cwd: Path, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


PIP_WHEEL = (
    *(sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-build-isolation"),
    *("--no-deps", "--no-index", "--wheel-dir", "dist"),
)
#: Builds the project in the working folder, as pip does; the argument says what.
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])('made')"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What an image is built from: a checkout as .dockerignore leaves it, links kept."""
    checkout = tmp_path_factory.mktemp("check out") / "tokenpod"
    checkout.mkdir()
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    left_out = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, checkout)
        else:
            ignore = shutil.ignore_patterns(*left_out)
            shutil.copytree(ROOT / name, checkout / name, ignore=ignore, symlinks=True)
    return checkout


def files_of(package: str) -> set[str]:
    """The files of a package's source, links followed, by their names in a wheel."""
    walked = os.walk(ROOT / "src" / package, followlinks=True)
    found = (
        Path(top, name).relative_to(ROOT / "src") for top, _, names in walked for name in names
    )
    return {
        str(path)
        for path in found
        if not any(fnmatch.fnmatch(part, each) for part in path.parts for each in LEFT_OUT)
    }


def files_in(wheel: Path, package: str) -> set[str]:
    """The names of a package's files in a wheel, but for the stubs that the build makes."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if name.startswith(f"{package}/") and "_pb2" not in name}


@pytest.fixture(scope="module")
def wheels(checkout: Path) -> dict[str, Path]:
    """The wheels, by package."""
    run(*PIP_WHEEL, "./client", ".", cwd=checkout)
    return {path.name.partition("-")[0]: path for path in (checkout / "dist").glob("*.whl")}


@pytest.fixture(scope="module")
def wheel(wheels: dict[str, Path]) -> Path:
    """The server's."""
    return wheels["tokenpod"]


def environment(home: Path, *wheels: Path) -> Path:
    """Make an environment with these wheels alone; where it has its packages."""
    venv.create(home, with_pip=False, symlinks=True)
    pip = [sys.executable, "-P", "-m", "pip", "--python", home / "bin" / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels, cwd=home)
    where = {"base": str(home), "platbase": str(home)}
    return Path(sysconfig.get_path("purelib", "venv", where))


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory) -> Path:
    """The folder of programs of an environment with both wheels, and our dependencies."""
    home = tmp_path_factory.mktemp("environment")
    packages = environment(home, *wheels.values())
    # A path in a .pth file is added, but the .pth files there are not read: dependencies come
    # along, the editable install of this checkout does not.
    theirs = distribution("grpcio").locate_file("")
    (packages / "dependencies.pth").write_text(f"{theirs}\n")
    bring_compiled_loops(packages / "tokenpod")
    return home / "bin"


def bring_compiled_loops(package: Path) -> None:
    """Those of this checkout, so far: a first start would take 10 seconds of a core for them.

    They are known by the time at which their source file was written.
    """
    for made in (ROOT / "kernels").rglob("__pycache__/*.nbc"):
        source = made.parent.with_name(made.name.partition(".")[0] + ".py")
        target = package / made.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(made, target)
        shutil.copystat(source, package / source.relative_to(ROOT))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An empty folder to work in."""
    return tmp_path


@pytest.fixture(scope="module")
def server(installed: Path, tmp_path_factory) -> Iterator[ServerProcess]:
    """A server that the installed program runs."""
    empty = tmp_path_factory.mktemp("empty")
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


def test_the_installed_program_simulates_a_trace(installed: Path, empty: Path) -> None:
    trace = "arrival_s,prompt_tokens,output_tokens\n0,20,3\n0.5,30,4\n"
    (empty / "trace.csv").write_text(trace)
    done = run(installed / "tokenpod", "simulate", "trace.csv", "--gpu", "cpu", cwd=empty)
    assert "preemptions: 0" in done.stdout


def test_the_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "tokenpod/py.typed" in names
    assert "tokenpod/models/demo/model.safetensors" in names
    assert "tokenpod/models/demo/tokenizer.json" in names
    outside = {name for name in names if not name.startswith(("tokenpod/", "tokenpod-"))}
    assert not outside
    assert not {name for name in names if "/tests/" in name or "/tools/" in name}


def test_the_wheels_hold_every_data_file_that_their_code_opens(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    opened = set()
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    for module in tmp_path.rglob("*.py"):
        for name in beside(module):
            opened.add(name)
            assert module.with_name(name).read_bytes(), f"{name}, which {module} opens, is empty"
    assert {"product_tiles.json", "models.json"} <= opened


def beside(module: Path) -> Iterator[str]:
    """Names of the files of its own folder that a module opens.

    Modules name them in one of two ways alone: `files(__package__).joinpath("name")` and
    `Path(__file__).with_name("name")`.
    """
    tree, places = ast.parse(module.read_text()), 0
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                ast.Attribute(
                    ast.Call(_, [ast.Name("__package__" | "__file__")]), "joinpath" | "with_name"
                ),
                [ast.Constant(str(name))],
            ):
                yield name
                places -= 1
            case ast.Name("__package__" | "__file__"):
                places += 1
    assert not places, f"{module} looks for files in a way that this test does not know"


def test_the_tables_of_tiles_are_read_from_the_installed_wheel(
    installed: Path, empty: Path
) -> None:
    code = """
from tokenpod.kernels.products import product_tiles
from tokenpod.kernels.products.quantised import quantised_tiles
for table in (product_tiles, quantised_tiles):
    assert "dependencies" not in table.__file__, table.__file__
    assert table.measured((9, 0)) and table.measured(None)
"""
    run(installed / "python", "-P", "-c", code, cwd=empty)


def test_the_clients_wheel_holds_the_stubs_of_every_protocol(wheels: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(wheels["tokenpod_client"]).namelist())
    assert "tokenpod_client/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    protos = [path.relative_to(ROOT) for path in (ROOT / "protos").rglob("*.proto")]
    assert len(protos) > 3
    for proto in protos:
        stem = str(proto.with_suffix(""))
        for made in (f"{stem}.proto", f"{stem}_pb2.py", f"{stem}_pb2.pyi", f"{stem}_pb2_grpc.py"):
            assert f"tokenpod_client/{made}" in names
    ours = ("tokenpod_client/", "tokenpod_client-")
    assert not {name for name in names if not name.startswith(ours)}


def test_no_file_is_in_both_wheels(wheels: dict[str, Path]) -> None:
    server, client = (set(zipfile.ZipFile(path).namelist()) for path in wheels.values())
    assert not server & client
    assert len(wheels) == 2


def test_the_server_wants_the_client_of_its_version(wheels: dict[str, Path]) -> None:
    _, version, _ = wheels["tokenpod"].name.split("-", 2)
    assert wheels["tokenpod_client"].name.startswith(f"tokenpod_client-{version}-")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"tokenpod-client[bench]=={version}" in wanted


def test_the_wheel_has_each_extra_that_a_page_or_a_message_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    extras = set(metadata.get_all("Provides-Extra", ()))
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/*.py")]
    told = "\n".join(path.read_text() for path in texts)
    named = set(re.findall(r"(?:tokenpod|tokenpod-\*\.whl\))\[([a-z0-9]+)\]", told))
    assert {"gateway", "vllm"} <= named <= extras
    wanted = [Requirement(text) for text in metadata.get_all("Requires-Dist", ())]
    brought = [str(each.specifier) for each in wanted if each.name == "smg"]
    (brought_by,) = (each.marker for each in wanted if each.name == "smg")
    assert brought_by is not None
    assert brought_by.evaluate({"extra": "gateway"})
    assert not brought_by.evaluate({"extra": ""})
    # Where it is installed by name, it is in the same version.
    assert {f"=={each}" for each in re.findall(r"smg==([0-9.]*[0-9])", told)} == set(brought)


@pytest.mark.parametrize("package", PROJECTS)
def test_a_wheel_has_every_file_of_its_package(wheels: dict[str, Path], package: str) -> None:
    assert files_in(wheels[package], package) == files_of(package)


@pytest.mark.parametrize(("package", "folder"), PROJECTS.items())
@pytest.mark.slow
def test_a_source_distribution_builds_the_same_wheel(
    checkout: Path, wheels: dict[str, Path], package: str, folder: str, tmp_path: Path
) -> None:
    (checkout / folder / "made").mkdir(exist_ok=True)
    run(sys.executable, "-P", "-c", BUILD, "build_sdist", cwd=checkout / folder)
    (source,) = (checkout / folder / "made").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert not [member.name for member in archive if not (member.isfile() or member.isdir())]
    run(*PIP_WHEEL, source, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    built, again = (zipfile.ZipFile(path).namelist() for path in (wheels[package], wheel))
    assert sorted(again) == sorted(built)


def test_editable_installs_are_plain_paths_that_every_editor_follows(
    checkout: Path, empty: Path
) -> None:
    for folder in PROJECTS.values():
        (checkout / folder / "made").mkdir(exist_ok=True)
        run(sys.executable, "-P", "-c", BUILD, "build_editable", cwd=checkout / folder)
    packages = environment(
        empty / "home", *checkout.glob("made/*.whl"), *checkout.glob("client/made/*.whl")
    )
    # Without import hooks, which type checkers and editors do not run.
    paths = {path.read_text().strip() for path in packages.glob("*.pth")}
    assert paths == {str(checkout / "src"), str(checkout / "client" / "src")}
    python = empty / "home" / "bin" / "python"
    code = """
from importlib.util import find_spec
import tokenpod.core.errors, tokenpod_client.protos
print(tokenpod.core.errors.__file__, find_spec("kernels"), find_spec("core"))
"""
    said = run(python, "-P", "-c", code, cwd=checkout).stdout
    assert said == f"{checkout}/src/tokenpod/core/errors.py None None\n"


@pytest.fixture(scope="module")
def alone(wheels: dict[str, Path], tmp_path_factory) -> Path:
    """The programs of an environment with the client and what it depends on, and nothing else."""
    home = tmp_path_factory.mktemp("client")
    packages = environment(home, wheels["tokenpod_client"])
    for name in needed("tokenpod-client"):
        for file in distribution(name).files or ():
            source, target = Path(str(file.locate())), packages / str(file)
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    return home / "bin"


def needed(project: str) -> set[str]:
    """What a distribution depends on, and what these depend on, without extras."""
    found: set[str] = set()
    todo = [project]
    while todo:
        for text in distribution(todo.pop()).requires or ():
            wanted = Requirement(text)
            name = wanted.name.lower().replace("_", "-")
            if name not in found and (not wanted.marker or wanted.marker.evaluate({"extra": ""})):
                found.add(name)
                todo.append(name)
    return found


def test_the_client_and_its_dependencies_take_30_megabytes_at_most(alone: Path) -> None:
    files = [path for path in alone.parent.rglob("site-packages/**/*") if path.is_file()]
    taken = sum(path.stat().st_size for path in files if "__pycache__" not in path.parts)
    assert taken <= 30e6, f"{taken:,} bytes"


def test_the_client_alone_generates_and_says_what_the_server_would_do(
    alone: Path, server: ServerProcess, empty: Path
) -> None:
    flags = ["--address", server.address, "--max-new-tokens", "4"]
    done = run(alone / "tokenpod", "generate", "import ", *flags, cwd=empty)
    assert done.stdout.strip()
    program = """
import sys
from tokenpod_client import Client
with Client(sys.argv[1]) as client:
    print(client.generate("import ", max_new_tokens=4).text())
    print(client.model().name)
heavy = {"torch", "numpy", "numba", "pydantic", "rich", "transformers", "tokenpod"}
print(sorted(heavy & sys.modules.keys()))
"""
    said = run(alone / "python", "-P", "-c", program, server.address, cwd=empty).stdout
    assert said.endswith("\ndemo\n[]\n")
    assert said.startswith(done.stdout)
    for arguments, told in (
        (["serve"], "error: serve is a command of the server: pip install tokenpod\n"),
        (["bench"], "error: bench needs numpy: pip install 'tokenpod-client[bench]'\n"),
    ):
        refused = subprocess.run(
            [alone / "tokenpod", *arguments], cwd=empty, capture_output=True, text=True, timeout=120
        )
        assert refused.returncode in (1, 2)
        assert refused.stderr == told


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
