"""Which kernels are launched, found out without a GPU; and their compilation, ahead of a launch.

Triton compiles a kernel when it is first launched with arguments of a kind: types, integers that
are 1 or multiples of 16, pointers that are aligned, constants. `Notes` replaces launches by notes
of that, so whatever launches kernels says what it would ask for; `Compilers` compile each as soon
as it is noted, side by side, into Triton's cache, where the launches will find them. The host's
side of launches is a program in C, which Triton compiles at the first launch: up to Triton 3.6 one
for each kind of arguments, and one for the driver. They are made here as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from triton import compile as compile_kernel
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key
from triton.runtime.build import _build
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction, create_function_from_signature

from tokenpod.core.own_process import die_with_parent

#: Threads of a warp, on all of NVIDIA's GPUs.
_WARP = 32
#: How a process ends that has compiled a kernel, but not what launches it.
_NO_LAUNCH_PROGRAM = 3


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel for arguments of a kind."""

    source: ASTSource
    options: Any
    target: GPUTarget

    @property
    def name(self) -> str:
        """Of the function."""
        return str(self.source.fn.__name__)

    @property
    def key(self) -> str:
        """Under which Triton's cache has it: of source, arguments, options and Triton itself."""
        backend = make_backend(self.target)
        return str(
            get_cache_key(self.source, backend, self.options, get_cache_invalidating_env_vars())
        )

    def compile(self) -> Any:
        """Compile it into the cache, unless it is there."""
        return compile_kernel(self.source, target=self.target, options=self.options.__dict__)

    def compile_launch(self, made: Any) -> None:
        """Compile the program that launches what was `made` of it, if it has one of its own.

        Raises NoProgramError.
        """
        if hasattr(nvidia, "make_launcher"):
            _compile_program(partial(nvidia.CudaLauncher, self.source, made.metadata))


class NoProgramError(Exception):
    """A program in C could not be compiled."""


def compile_driver() -> None:
    """Compile the program that loads kernels, and from Triton 3.7 on launches all.

    Raises NoProgramError.
    """
    _compile_program(nvidia.CudaUtils)


def _compile_program(load: Callable[[], object]) -> None:
    """Have Triton compile a program in C into its cache. Raises NoProgramError.

    `load` compiles it and loads it; the latter needs NVIDIA's driver, which may be missing here.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            try:
                nvidia.libcuda_dirs()
            except (AssertionError, OSError, subprocess.CalledProcessError):
                _build_stub(Path(folder))
                knobs.nvidia.libcuda_path = folder
                # It warns of each program that it finds and can't load.
                logging.getLogger("triton.runtime.build").setLevel(logging.ERROR)
            with contextlib.suppress(ImportError):  # it is in the cache
                load()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise NoProgramError(str(error)) from error


def _build_stub(folder: Path) -> None:
    """A library in NVIDIA's driver's place, of its name, to link with: its functions do nothing."""
    sources = [Path(nvidia.__file__).with_name(name) for name in ("driver.py", "driver.c")]
    names = {name for each in sources for name in re.findall(r"\bcu[A-Z]\w+", each.read_text())}
    source = folder / "stub.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(names)))
    name = "libcuda.so.1"
    made = _build("stub", str(source), str(folder), [], [], [], [f"-Wl,-soname,{name}"])
    Path(made).rename(folder / name)


class Notes:
    """Takes the place of launches in this process, and keeps what they would have launched.

    Args:
        capability: of the GPU that kernels are for.
        found: is called with each kernel once, in the order of their first launches.
    """

    def __init__(
        self, capability: tuple[int, int], found: Callable[[Kernel], object] | None = None
    ) -> None:
        self._found = found
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], _WARP)
        self._backend = make_backend(self._target)
        self._kernels: dict[tuple[JITFunction[Any], str], Kernel] = {}
        self._binder = cache(self._made_binder)

    @property
    def kernels(self) -> list[Kernel]:
        """All so far, each once, in the order of their first launches."""
        return [*self._kernels.values()]

    def begin(self) -> None:
        """From now on no kernel runs in this process."""
        notes = self

        def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            del grid, warmup
            notes._note(self, args, named)

        JITFunction.run = run

    def _note(self, kernel: JITFunction[Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        named |= {"debug": False, "instrumentation_mode": ""}
        bound, specialisation, options = self._binder(kernel)(*args, **named)
        key = kernel, f"{specialisation} {options}"
        if key in self._kernels:
            return
        options, signature, constants, attributes = kernel._pack_args(
            self._backend, named, bound, specialisation, options
        )
        source = ASTSource(kernel, signature, constants, attributes)
        self._kernels[key] = noted = Kernel(source, options, self._target)
        if self._found is not None:
            self._found(noted)

    def _made_binder(self, kernel: JITFunction[Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = create_function_from_signature(
            kernel.signature, kernel.params, self._backend
        )
        return made


class Compilers:
    """Processes that compile kernels into the cache, so many at a time.

    Each is forked for its kernel, and has all that kernels are full of. No other thread may run.
    """

    def __init__(self, processes: int) -> None:
        #: Kernels that the cache had not.
        self.lacking = 0
        #: Programs in C that could not be compiled: first launches try it again.
        self.no_programs = 0
        self._processes = processes
        #: Digests of the keys of all that were given.
        self._taken: set[str] = set()
        self._waiting: list[Kernel] = []
        #: By process, what it compiles.
        self._running: dict[int, str] = {_begun(compile_driver): "of the driver"}

    def take(self, kernel: Kernel) -> None:
        """Compile it, unless it is there or under way: now, or when a process has ended."""
        digest = hashlib.sha256(kernel.key.encode()).hexdigest()
        if digest in self._taken:
            return
        self._taken.add(digest)
        if get_cache_manager(digest).get_group(f"{kernel.name[:150]}.json") is not None:
            return
        self.lacking += 1
        self._waiting.append(kernel)
        # Those of sampling sort in registers, and take seconds each; others take half of one.
        self._waiting.sort(key=_is_short)
        self._see_ended(os.WNOHANG)
        self._begin()

    def end(self) -> None:
        """Wait for all. Raises RuntimeError for one that could not be compiled."""
        while self._running:
            self._see_ended(0)
            self._begin()

    def _begin(self) -> None:
        while len(self._running) < self._processes and self._waiting:
            kernel = self._waiting.pop(0)
            self._running[_begun(partial(_compile, kernel))] = kernel.name

    def _see_ended(self, how: int) -> None:
        while self._running:
            process, status = os.waitpid(-1, how)
            if not process:
                return
            name = self._running.pop(process, "")
            if os.waitstatus_to_exitcode(status) == _NO_LAUNCH_PROGRAM:
                self.no_programs += 1
            elif status:
                raise RuntimeError(f"kernel {name} could not be compiled")
            how = os.WNOHANG


def _begun(work: Callable[[], object]) -> int:
    """A process that does it, by its number."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        die_with_parent()
        work()
        status = 0
    except NoProgramError:
        status = _NO_LAUNCH_PROGRAM
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _compile(kernel: Kernel) -> None:
    kernel.compile_launch(kernel.compile())


def _is_short(kernel: Kernel) -> bool:
    return ".sampling." not in kernel.source.fn.__module__
