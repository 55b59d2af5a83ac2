"""From this checkout to an image, without a registry: a base from debootstrap, wheels by hash."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from image.commands import read, run
from image.wheels import fetch

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "image"

#: The release that the Dockerfile's own base is of.
SUITE = "bookworm"
_LOCAL_BASE = f"localhost/tokenpod-base:{SUITE}"
#: Where a few hundred megabytes may lie for minutes, as device files too.
_SCRATCH = "/var/tmp"
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
    # Not in the checkout: debootstrap takes no folder whose path has a space. If it fails, its log
    # stays where it says that it is.
    scratch = Path(tempfile.mkdtemp(prefix="tokenpod-base-", dir=_SCRATCH))
    folder = scratch / "root"
    folder.mkdir()
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
    shutil.rmtree(scratch)
    return _LOCAL_BASE


def build(variant: str, base: str | None, index: str) -> str:
    """Build the variant `cpu` or `cuda` on `base`, or on one made here; the image's name.

    `index` is where torch's CPU build is looked for first; empty: only where pip looks by itself.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    # The chart looks for the same name in a registry.
    name = f"localhost/tokenpod:{version}-{variant}"
    # One folder a variant: to pip, torch's build for CPUs is as good an answer as that for CUDA.
    wheels = fetch(variant, ROOT / "requirements", WORK / "wheels" / variant, index)
    arguments = {
        "BASE": base or base_image(),
        "VARIANT": variant,
        "PIP_FIND_LINKS": "/wheels",
        "PIP_NO_INDEX": "1",
        "VERSION": version,
        "REVISION": read("git", "-C", ROOT, "rev-parse", "HEAD"),
    }
    given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    run(*_BUILD, *given, "--volume", f"{wheels}:/wheels:ro", "--tag", name, ROOT)
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
