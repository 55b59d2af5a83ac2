"""`make image`: look into an image that has been built, and generate with it.

python tools/image.py try NAME [COMMAND ...]   start it as the image does, or with another command
python tools/image.py contents [ROOT]          what is below a root folder: an unpacked image, or /

The engine is docker, or what DOCKER names: a program with docker's command line. `contents` runs
with the standard library alone, and so in the image itself, or on any folder where there is no
engine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

BILL = "opt/tokenpod/sbom.cdx.json"
COMPILERS = ("cc", "gcc", "g++", "clang", "tcc", "ld", "as")
MB = 1_000_000
START_SECONDS = 120
#: As Kubernetes' restricted profile; folders that the server may write to get volumes.
RESTRICTED = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--network", "none", "--tmpfs", "/tmp", "--tmpfs", "/var/cache/tokenpod:mode=1777,exec"),
)
#: Has Triton compile and load a module, as it does with the launcher of a kernel.
COMPILE = """
from triton.runtime.build import compile_module_from_src
source = '''
#include <Python.h>
static struct PyModuleDef probe = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&probe); }
'''
print(compile_module_from_src(source, "probe").__file__)
"""


def canonical(name: str) -> str:
    """A distribution's name, written in the one way that registries compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def found(root: Path) -> list[Distribution]:
    """The distributions of the server's environment in an image."""
    (packages,) = (root / "opt/tokenpod/lib").glob("python3*/site-packages")
    return list(distributions(path=[str(packages)]))


def check_bill(root: Path) -> int:
    """How many components an image's bill has. Raises SystemExit unless they are what is there."""
    there = {(canonical(each.name), each.version) for each in found(root)}
    components = json.loads((root / BILL).read_text())["components"]
    billed = {(canonical(each["name"]), each["version"]) for each in components}
    if odd := sorted(there ^ billed):
        raise SystemExit(f"the bill of materials and what is installed differ: {odd}")
    return len(billed)


def check_files(root: Path) -> int:
    """How many files our distributions have. Raises SystemExit if one is missing, or a link."""
    ours = [each for each in found(root) if canonical(each.name).startswith("tokenpod")]
    files = [Path(str(each.locate_file(file))) for each in ours for file in each.files or ()]
    if odd := [str(path) for path in files if not path.is_file() or path.is_symlink()]:
        raise SystemExit(f"these files of tokenpod are not there: {odd}")
    return len(files)


def compilers(root: Path) -> list[str]:
    """C compilers and what belongs to them, by the names of their programs."""
    return [name for name in COMPILERS if (root / "usr/bin" / name).exists()]


def size(paths: Iterable[Path]) -> int:
    """Bytes of files, each counted once however many names it has; links are none."""
    stats = [path.stat() for path in paths if path.is_file() and not path.is_symlink()]
    return sum({(each.st_dev, each.st_ino): each.st_size for each in stats}.values())


def contents(root: Path) -> None:
    """Print what an image holds. Raises SystemExit if it is not what it should be."""
    parts = {
        each.name: [Path(str(each.locate_file(f))) for f in each.files or ()]
        for each in found(root)
    }
    sizes = {name: size(files) for name, files in parts.items()}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:12]:
        print(f"  {sizes[name] / MB:8,.0f} MB  {name}")
    environment = (
        Path(top, name) for top, _, names in os.walk(root / "opt/tokenpod") for name in names
    )
    print(f"  {size(environment) / MB:8,.0f} MB  the whole environment")
    print(f"bill of materials: {check_bill(root)} distributions, as installed")
    print(f"tokenpod: {check_files(root)} files")
    print(f"compilers: {', '.join(compilers(root)) or 'none'}")


def docker(*words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the engine. Raises SystemExit with its complaint if it fails and should not."""
    command = [*os.environ.get("DOCKER", "docker").split(), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if ok and done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ended with {done.returncode}: {done.stderr}")
    return done


def try_out(name: str, command: list[str]) -> None:
    """Look into an image, start the server as it does, generate, stop. Raises SystemExit if not."""
    inside = ("run", "--rm", "--interactive", "--network", "none", "--entrypoint", "python", name)
    with Path(__file__).open() as source:
        words = [*os.environ.get("DOCKER", "docker").split(), *inside, "-P", "-", "contents"]
        if subprocess.run(words, stdin=source).returncode:
            raise SystemExit(1)
    (about,) = json.loads(docker("inspect", name).stdout)
    # Podman has it outside of the image's configuration.
    _, *check = (about["Config"].get("Healthcheck") or about["Healthcheck"])["Test"]
    container = docker("run", "--detach", *RESTRICTED, name, *command).stdout.strip()
    try:
        began = time.monotonic()
        while docker("exec", container, *check, ok=False).returncode:
            state = docker("inspect", "--format", "{{.State.Running}}", container).stdout.strip()
            if state != "true" or time.monotonic() - began > START_SECONDS:
                raise SystemExit(f"the server was not healthy:\n{docker('logs', container).stderr}")
            time.sleep(0.5)
        print(f"healthy after {time.monotonic() - began:.1f} s")
        user = docker("exec", container, "stat", "--format", "%u:%g", "/proc/1").stdout.strip()
        refused = docker("exec", container, "touch", "/opt/tokenpod/x", ok=False)
        print(f"the server's user is {user}; {refused.stderr.strip()}")
        if "0" in user.split(":") or not refused.returncode:
            raise SystemExit("it runs as root, or can write to its root folder")
        done = docker("exec", container, "tokenpod", "generate", "import ", "--max-new-tokens", "8")
        print(done.stdout, done.stderr, sep="")
        if "[8 tokens; " not in done.stderr:
            raise SystemExit("tokenpod generate did not stream 8 tokens")
        if not docker("exec", container, "sh", "-c", "command -v gcc", ok=False).returncode:
            print(
                "Triton:", docker("exec", container, "python", "-P", "-c", COMPILE).stdout.strip()
            )
        docker("stop", container)
        status = docker("inspect", "--format", "{{.State.ExitCode}}", container).stdout.strip()
        print(f"SIGTERM: exit status {status}")
        if status != "0":
            raise SystemExit("the server did not stop as it should")
    finally:
        docker("rm", "--force", container)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    tried = commands.add_parser("try")
    tried.add_argument("name")
    tried.add_argument("command", nargs=argparse.REMAINDER)
    commands.add_parser("contents").add_argument("root", nargs="?", type=Path, default=Path("/"))
    options = parser.parse_args()
    if options.what == "contents":
        contents(options.root)
    else:
        try_out(options.name, options.command)


if __name__ == "__main__":
    main()
