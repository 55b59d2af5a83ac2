"""Launches of kernels that were launched before, in less of the host's time.

Triton binds, describes and compares all arguments at each launch, which takes a host longer than
many kernels take a GPU: 14 launches of a layer that is not captured are a millisecond. `launched`
remembers which compiled kernel arguments of a kind had, and launches it as Triton's own tutorials
launch a compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

#: Addresses and integers that are multiples of this get a kernel of their own from Triton.
_ALIGNED = 16
_INT32 = 1 << 31
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def launched(kernel: Any) -> Any:
    """The same kernel, whose launches after the first of a kind take less of the host's time.

    For a function of `triton.jit` that is launched as kernel[grid](*arguments, NAME=constant, ...):
    constants and options by name, all others by position. An interpreted one stays as it is.
    """
    return Launched(kernel) if isinstance(kernel, JITFunction) else kernel


class Launched:
    """A kernel, and what Triton compiled of it, by kinds of arguments."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel
        self.__doc__, self.__name__ = kernel.__doc__, kernel.__name__
        constants = [param.is_constexpr for param in kernel.params]
        #: How many arguments can be given by position.
        self._variables = constants.index(True) if True in constants else len(constants)
        assert all(constants[self._variables :]), f"{kernel.__name__}: constants come last"
        self._found: dict[Any, _Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        key = kinds(args), *named, *named.values()
        found = self._found.get(key)
        if found is None:
            assert len(args) == self._variables, f"{self.__name__}: {len(args)} by position"
            compiled = self.kernel[grid](*args, **named)
            if compiled is not None:  # it was launched, not noted
                self._found[key] = self._described(compiled, named)
            return
        # A process has one device, and a kernel is loaded into one.
        stream = driver.active.get_current_stream(found.device)
        x, y, z = (*grid, 1, 1)[:3]
        run, function, metadata = found.run, found.function, found.metadata
        run(x, y, z, stream, function, metadata, None, None, None, *args, *found.constants)

    def _described(self, compiled: Any, named: dict[str, Any]) -> _Compiled:
        params = self.kernel.params[self._variables :]
        constants = tuple(named.get(param.name, param.default) for param in params)
        device = driver.active.get_current_device()
        run, function = compiled.run, compiled.function
        return _Compiled(device, run, function, compiled.packed_metadata, constants)


class _Compiled(NamedTuple):
    """What a launch needs besides its grid, its stream and the arguments by position."""

    device: int
    run: Callable[..., None]
    function: Any
    metadata: Any
    #: In the order of the kernel's parameters.
    constants: tuple[Any, ...]


def kinds(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of these arguments Triton chooses a kernel by, or more."""
    found: list[Any] = []
    for each in args:
        of = type(each)
        if of in _TENSORS:
            found.append(each.dtype if each.data_ptr() % _ALIGNED == 0 else (each.dtype,))
        elif of is int:
            wide = not -_INT32 <= each < _INT32
            found.append((each == 1) + 2 * (each % _ALIGNED == 0) + 4 * wide)
        elif each is None:
            found.append(None)
        elif of is float or of is bool:
            found.append(of)
        elif isinstance(each, tuple):
            found.append((of, kinds(each)))
        elif of is TensorDescriptor:
            found.append((of, each.base.dtype, *each.block_shape))
        else:
            raise TypeError(f"a kernel's argument is of {of}")
    return tuple(found)
