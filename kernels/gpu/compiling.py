"""Which kernels are launched, found out without a GPU; and their compilation, ahead of a launch.

Triton compiles a kernel when it is first launched with arguments of a kind: types, integers that
are 1 or multiples of 16, pointers that are aligned, constants. `Notes` replaces launches by notes
of that, so whatever launches kernels says what it would ask for; `compile_all` compiles them in
processes side by side into Triton's cache, where the launches will find them.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction, create_function_from_signature

from tokenpod.core.own_process import die_with_parent

#: Threads of a warp, on all of NVIDIA's GPUs.
_WARP = 32


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


class Notes:
    """Takes the place of launches in this process, and keeps what they would have launched.

    Args:
        capability: of the GPU that kernels are for.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
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
        self._kernels[key] = Kernel(source, options, self._target)

    def _made_binder(self, kernel: JITFunction[Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = create_function_from_signature(
            kernel.signature, kernel.params, self._backend
        )
        return made


def missing(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Those that Triton's cache does not have."""

    def is_there(kernel: Kernel) -> bool:
        digest = hashlib.sha256(kernel.key.encode()).hexdigest()
        return get_cache_manager(digest).get_group(f"{kernel.name[:150]}.json") is not None

    return [kernel for kernel in kernels if not is_there(kernel)]


def compile_all(kernels: Sequence[Kernel], processes: int) -> None:
    """Compile these, so many at a time. Forks: no other thread may run."""
    if not kernels:
        return
    # Those of sampling sort in registers, and take seconds each; others take half of one.
    ordered = sorted(kernels, key=_is_short)
    processes = min(processes, len(ordered))
    # What is inherited need not be sent: kernels are full of functions and types.
    with multiprocessing.get_context("fork").Pool(processes, _inherit, (ordered,)) as pool:
        for _ in pool.imap_unordered(_compile_one, range(len(ordered)), chunksize=1):
            pass


#: What a forked process compiles.
_INHERITED: list[Kernel] = []


def _inherit(kernels: list[Kernel]) -> None:
    die_with_parent()
    _INHERITED[:] = kernels


def _is_short(kernel: Kernel) -> bool:
    return ".sampling." not in kernel.source.fn.__module__


def _compile_one(at: int) -> None:
    _INHERITED[at].compile()
