"""Build an image, look into it, generate with it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from torch_build import index_to_try

from image.build import build, inspect, mounted
from image.commands import check_needs
from image.container import Container, running
from image.contents import MB, check_bill, compilers, fillings, size

#: With a root folder that can't be written to, these get volumes: the chart has them too.
WRITABLE = ["/tmp", "/var/cache/tokenpod"]
PROMPT = "import "
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="make image", description=__doc__)
    parser.add_argument("--variant", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--base", help="a Debian image; one is made here if none is named")
    parser.add_argument("--built", metavar="NAME", help="look at this image; build nothing")
    parser.add_argument(
        "command", nargs="*", help="what is started instead of serve: -- serve --num-shard 2"
    )
    options = parser.parse_args()
    check_needs()
    # The image for CPUs is for machines without a driver, wherever it is built.
    index = index_to_try(os.environ, driver=False)
    name = options.built or build(options.variant, options.base, index)
    with mounted(name) as root:
        config = inspect(name)["config"]
        config["Cmd"] = options.command or config["Cmd"]
        show(name, root)
        try_out(root, config)
    return 0


def show(name: str, root: Path) -> None:
    """What the image holds."""
    print(f"\n{name}: {size(root) / MB:,.0f} MB")
    for filling in fillings(root):
        print(f"  {filling.size / MB:8,.0f} MB  {filling.name}")
    print(f"bill of materials: {check_bill(root)} distributions, as installed")
    print(f"compilers: {', '.join(compilers(root)) or 'none'}")


def try_out(root: Path, config: dict[str, Any]) -> None:
    """Start the server as the image does, generate a token, stop it."""
    # Docker's forms: CMD, and a program with its arguments.
    kind, *check = config["Healthcheck"]["Test"]
    if kind != "CMD":
        raise SystemExit(f"the image's health check is {kind}: CMD is needed")
    with running(root, config, WRITABLE) as container:
        print(f"\n$ {shlex.join([*config['Entrypoint'], *config['Cmd']])}")
        print(f"healthy after {container.wait_until_healthy(check):.1f} s")
        refused = container.run("touch", "/opt/tokenpod/x")
        user = container.run("stat", "--format", "%u:%g", "/proc/1").stdout.strip()
        print(f"the server's user is {user}; {refused.stderr.strip()}")
        if refused.returncode == 0:
            raise SystemExit("the root folder can be written to")
        done = container.run("tokenpod", "generate", PROMPT, "--max-new-tokens", "8")
        print(f"$ tokenpod generate {PROMPT!r} --max-new-tokens 8\n{done.stdout}{done.stderr}")
        if done.returncode or "[8 tokens; " not in done.stderr:
            raise SystemExit(f"tokenpod generate ended with status {done.returncode}")
        if compilers(root):
            check_compiler(container)
        status = container.stop()
        print(f"SIGTERM: exit status {status}")
        if status:
            raise SystemExit("the server did not stop as it should")


def check_compiler(container: Container) -> None:
    """Raises SystemExit unless Triton can use the compiler that the image has."""
    done = container.run("python", "-P", "-c", COMPILE)
    print(f"compiled by Triton: {done.stdout.strip()}")
    if done.returncode:
        raise SystemExit(f"Triton can't compile: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
