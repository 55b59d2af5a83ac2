"""What one pass of a model computes on a CPU, noted so that it can be computed again.

A step of few rows takes Python as long as the processor: each loop is called through layers, views
and checks that find the same as in the step before. A tape notes the loops with their arguments and
torch's operations, and keeps all memory that was allocated. Played, it computes the same from what
lies at the same addresses then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenpod.kernels.compiled.loops import Loop, player
from tokenpod.kernels.operations.batch import Run

#: Operations that make memory and write nothing there, or a constant.
_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh"}


class Refreshed(Protocol):
    """What a pass has found out about its step before the first loop."""

    def refresh(self, b_runs: Sequence[list[Run]], b_context: Sequence[int]) -> bool:
        """Find out the same of a step with as many rows; False: there is no room for it."""
        ...


class Tape(TorchDispatchMode):
    """Notes what is computed within its context.

    Only what loops and torch's operations compute: numpy's results and what Python decides are
    taken to be the same each time. Who plays a tape compares what it computes once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[Refreshed] = []
        #: Whether all that has been computed can be computed again.
        self.whole = True
        #: Bytes that are kept.
        self.nbytes = 0
        self._calls: list[tuple[Loop, Any, int, int] | Callable[[], Any]] = []
        self._kept: list[Any] = []
        self._acts: list[Callable[[], Any]] = []

    def __enter__(self) -> Tape:
        Loop.tape = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        Loop.tape = None
        super().__exit__(*raised)
        loops: list[tuple[int, int, int]] = []
        for call in [*self._calls, None]:
            if isinstance(call, tuple):
                loop, memory, address, threads = call
                self._kept.append(memory)
                loops.append((loop.address, address, threads))
                continue
            if loops:
                table = np.array(loops, np.int64)
                self._kept.append(table)
                self._acts.append(player(table))
                loops = []
            if call is not None:
                self._acts.append(call)

    def play(self) -> None:
        """Compute it again."""
        for act in self._acts:
            act()

    def called(self, loop: Loop, memory: Any, address: int, threads: int) -> None:
        """A loop ran with the arguments in `memory`, which nobody else gets."""
        self._calls.append((loop, memory, address, threads))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note it."""
        del types
        named = kwargs or {}
        found = func(*args, **named)
        self._kept.append(found)
        parts = found if isinstance(found, tuple | list) else [found]
        if torch.Tag.inplace_view in func.tags:
            pass
        elif func._schema.is_mutable:
            self._calls.append(functools.partial(func, *args, **named))
        elif all(_is_view(part, args) for part in parts):
            pass
        elif not isinstance(found, torch.Tensor):
            self.whole = False
        else:
            self.nbytes += found.nbytes
            if func._schema.name.removeprefix("aten::") not in _ALLOCATE:
                self._calls.append(_into(found, func, args, named))
        return found


def _into(
    found: torch.Tensor, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Callable[[], Any]:
    """Computes what was found once more, in the same memory."""
    out, given = getattr(func.overloadpacket, "out", None), func._schema.arguments
    if out is None or [a.name for a in out._schema.arguments if not a.is_out] != [
        a.name for a in given
    ]:
        return lambda: found.copy_(func(*args, **named))
    return functools.partial(out, *args, **named, out=found)


def _is_view(found: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is a tensor that lies where one of these does."""
    return isinstance(found, torch.Tensor) and any(
        isinstance(each, torch.Tensor)
        and not each.is_mkldnn
        and found.untyped_storage().data_ptr() == each.untyped_storage().data_ptr()
        for each in args
    )
