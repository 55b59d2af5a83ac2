"""Which programs in C launches would have Triton compile: `launch_programs.py FOLDER ROWS`.

In a process of its own, with the cache that `tokenpod compile` has filled (TRITON_CACHE_DIR).
Prints as JSON the names of those that are there, and of those that are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

from triton.backends.nvidia import driver as nvidia
from triton.runtime.build import platform_key
from triton.runtime.cache import get_cache_manager

from tokenpod.engine.startup.weightless import find_kernels
from tokenpod.kernels.gpu.launch import Gpu
from tokenpod.service.config.sources import load_settings
from tokenpod.service.pod.placement import engine_options

THERE: list[str] = []
LACKING: list[str] = []


def look(src: str, name: str, **_: object) -> SimpleNamespace:
    """In the place of what compiles a program, if Triton's cache has not got it under its key."""
    key = hashlib.sha256((src + platform_key()).encode()).hexdigest()
    found = get_cache_manager(key).get_file(f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    (LACKING if found is None else THERE).append(name)
    return SimpleNamespace(launch=None)


if __name__ == "__main__":
    settings = load_settings(model_id=sys.argv[1], device="cuda", max_batch_size=int(sys.argv[2]))
    nvidia.compile_module_from_src = look
    nvidia.libcuda_dirs = list
    with contextlib.suppress(AttributeError):  # what it takes from the program
        nvidia.CudaUtils()
    for kernel in find_kernels(
        engine_options(settings, Path(sys.argv[1]), "")[0], Gpu((9, 0), 132)
    ):
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(kernel.source, kernel.compile().metadata)
    print(json.dumps([THERE, LACKING]))
