"""From this checkout to an image, without a registry: a base from debootstrap, wheels by hash."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from image.commands import read, run

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "image"

#: The release that the Dockerfile's own base is of.
SUITE = "bookworm"
_LOCAL_BASE = f"localhost/tokenpod-base:{SUITE}"
#: What Debian's slim images leave out.
_SLIM = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")
_USED_UP = ("var/cache/apt", "var/lib/apt/lists", "var/log")

#: chroot, so that a build works where no container may be started.
_BUILD = (
    "buildah",
    "build",
    "--isolation",
    "chroot",
    "--format",
    "docker",
    "--layers",
    "--force-rm",
)


def base_image() -> str:
    """The name of a Debian image made here; it is kept between builds."""
    if read("buildah", "images", "--noheading", "--filter", f"reference={_LOCAL_BASE}"):
        return _LOCAL_BASE
    folder = WORK / "base"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run("debootstrap", "--variant=minbase", SUITE, folder)
    for path in _SLIM:
        shutil.rmtree(folder / path, ignore_errors=True)
    for path in _USED_UP:
        for left in (folder / path).rglob("*"):
            if left.is_file():
                left.unlink()
    container = read("buildah", "from", "scratch")
    run("buildah", "add", "--quiet", container, folder, "/")
    run("buildah", "config", "--env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", container)
    run("buildah", "commit", "--quiet", "--rm", container, _LOCAL_BASE)
    shutil.rmtree(folder)
    return _LOCAL_BASE


def wheels(variant: str) -> Path:
    """A folder with the wheels of the variant's locks; pip finds them by its own settings."""
    # One a variant: to pip, torch's build for CPUs is as good an answer as that for CUDA.
    folder = WORK / "wheels" / variant
    for lock in (f"runtime-{variant}", "build", "sbom"):
        run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--find-links", folder, "--dest", folder),
            *("--requirement", ROOT / "requirements" / f"{lock}.txt"),
        )
    return folder


def build(variant: str, base: str | None) -> str:
    """Build the variant `cpu` or `cuda` on `base`, or on one made here; the image's name."""
    name = f"localhost/tokenpod:{variant}"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    arguments = {
        "BASE": base or base_image(),
        "VARIANT": variant,
        "PIP_FIND_LINKS": "/wheels",
        "PIP_NO_INDEX": "1",
        "VERSION": version,
        "REVISION": read("git", "-C", ROOT, "rev-parse", "HEAD"),
    }
    given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    run(*_BUILD, *given, "--volume", f"{wheels(variant)}:/wheels:ro", "--tag", name, ROOT)
    return name


def inspect(name: str) -> dict[str, Any]:
    """The configuration of an image, as Docker has it."""
    told: dict[str, Any] = json.loads(read("buildah", "inspect", "--type", "image", name))
    return told["Docker"]


@contextlib.contextmanager
def mounted(name: str) -> Iterator[Path]:
    """The root folder of an image."""
    container = read("buildah", "from", "--pull-never", name)
    try:
        yield Path(read("buildah", "mount", container))
    finally:
        read("buildah", "rm", container)
