"""Loops compiled to machine code and run by torch's own OpenMP team.

torch has a team of threads that spin while they wait for its next parallel region. A second team on
the same cores would wait for the first, and the first for it; so these loops are handed to torch's,
through the entry point that compilers use (GOMP_parallel). Items are taken one by one from a shared
counter: a thread that the system has put aside holds up no more than the item it is at.

A loop body gets the address of its arguments, 64-bit numbers all: integers, addresses of tensors,
and the bits of float64s. It reads like this:

    @loop
    def _double(address):
        a = arguments(address)
        x = floats(a[FIRST], (a[END],))
        i = take(a)
        while i < a[END]:
            x[i] *= 2
            i = take(a)

    _double(len(x), x.data_ptr())

Compiled code is kept on disk, by source file: after a change in this file delete `__pycache__`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

log = logging.getLogger("tokenpod.engine")

#: Where a loop finds the number of its items, and its first own argument.
END, FIRST = 2, 3
#: Bytes that `fetch` brings near.
LINE = 64
#: Sums in any order and fused products, but NaN and Inf stay what they are.
ARITHMETIC = {"reassoc", "contract", "nsz", "arcp", "afn"}

_COUNTER, _ADDRESS = 0, 1
_MOST_ARGUMENTS = 32
#: Seconds that a process waits for what another one compiles.
_LONGEST_TURN = 60.0

#: Compiles a function that loop bodies call, into them.
inlined = functools.partial(
    njit, nogil=True, fastmath=ARITHMETIC, error_model="numpy", boundscheck=False
)


@intrinsic
def _add_one(typing_context: Any, address: Any) -> Any:
    """The int64 at `address`, and atomically one more there."""

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del context, signature
        counter = builder.inttoptr(operands[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """A number as the address it is."""

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del context, signature
        return builder.inttoptr(operands[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def fetch(typing_context: Any, address: Any) -> Any:
    """Have the line at an address brought near, into the second cache; it may be nobody's."""

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del signature
        prefetch(builder, operands[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def fetch_to_write(typing_context: Any, address: Any) -> Any:
    """The same of what will be written."""

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del signature
        prefetch(builder, operands[0], 1)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(builder: Any, address: Any, writes: int = 0) -> None:
    """The same in the compiler's language."""
    place, word = cgutils.voidptr_t, ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [place, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = [ir.Constant(word, each) for each in (writes, 2, 1)]  # the second cache; data
    builder.call(function, [builder.inttoptr(address, place), *how])


@inlined()
def arguments(address):
    """All arguments, an int64 array."""
    return carray(address, (_MOST_ARGUMENTS,), numba.int64)


@inlined()
def take(a):
    """The next item that nobody has begun; past the last one from a[END] on."""
    return _add_one(a[_ADDRESS])


@inlined()
def floats(address, shape):
    """The float32 tensor of `shape` at `address`."""
    return carray(pointer(address), shape, numba.float32)


@inlined()
def small_integers(address, shape):
    """The int8 tensor of `shape` at `address`."""
    return carray(pointer(address), shape, numba.int8)


@inlined()
def integers(address, shape):
    """The int64 tensor of `shape` at `address`."""
    return carray(pointer(address), shape, numba.int64)


@inlined()
def real(a, i):
    """Argument `i`, which is the bits of a float64, as float32."""
    return numba.float32(a[i : i + 1].view(numba.float64)[0])


def bits(number: float) -> int:
    """A float as an argument."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


class Notes(Protocol):
    """Who notes what loops are called with: see `Tape`."""

    #: What steps have found out before their first loop.
    plans: list[Any]
    #: Whether all that has been computed can be computed again.
    whole: bool

    def called(self, loop: Loop, memory: Any, address: int, threads: int) -> None:
        """A loop ran with the arguments in `memory`, which nobody else gets."""
        ...


class Loop:
    """A compiled loop; calling it runs all its items and returns when they are done."""

    #: Notes the calls of all loops; None: nobody does.
    tape: ClassVar[Notes | None] = None

    def __init__(self, body: Callable[[Any], None]) -> None:
        compiled = _compiled(types.void(types.voidptr), body)
        self.address, self._run = compiled.address, compiled.ctypes
        #: Memory for arguments that no call has just now: making some takes longer than a call.
        self._free: list[tuple[Any, int]] = []

    def __call__(self, items: int, *own: int) -> None:
        """Run items 0 to `items` - 1 with a body's own arguments."""
        try:
            memory, address = self._free.pop()
        except IndexError:
            memory = (ctypes.c_int64 * _MOST_ARGUMENTS)()
            address = ctypes.addressof(memory)
        _PACKS[len(own)](memory, 0, 0, address, items, *own)
        threads = min(torch.get_num_threads(), items)
        team = _team() if threads > 1 else None
        if team is None:
            self._run(address)
        else:
            team(self.address, address, threads, 0)
        if self.tape is None:
            self._free.append((memory, address))
        else:
            self.tape.called(self, memory, address, 1 if team is None else threads)


#: By how many arguments a body has of its own: writes all arguments into memory.
_PACKS = [struct.Struct(f"{FIRST + own}q").pack_into for own in range(_MOST_ARGUMENTS - FIRST + 1)]


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """One file per compiled body and set of constants, named by them.

    numba numbers files and keeps an index of them. Two processes that compile at once can give two
    bodies the same number, and each would then run the other's code.
    """

    def __init__(self, folder: str, body: str, stamp: Any, turn: contextlib.ExitStack) -> None:
        super().__init__(folder, body, stamp)
        self._turn = turn

    def save(self, key: Any, data: Any) -> None:
        """Replaces what was made from an older source file. A full disk ends no start."""
        try:
            self._save_data(self._name_of(key), (self._source_stamp, data))
        except OSError as error:
            log.warning("compiled code can't be kept: %s", error)

    def load(self, key: Any) -> Any:
        """None: there is none of this source file, and no other process makes it meanwhile."""
        made = self._made(key)
        if made is None:
            self._turn.enter_context(_turn_at(self._cache_path))
            made = self._made(key)
        return made

    def _made(self, key: Any) -> Any:
        try:
            stamp, data = self._load_data(self._name_of(key))
        except OSError:
            return None
        except Exception as error:  # what reading a damaged pickle may raise
            log.warning("compiled code that was kept can't be read: %s", error)
            return None
        return data if stamp == self._source_stamp else None

    def _name_of(self, key: Any) -> Any:
        digest = hashlib.sha256(repr((self._version, key)).encode()).digest()
        return self._data_name(int.from_bytes(digest[:16]))


@contextlib.contextmanager
def _turn_at(folder: str) -> Iterator[None]:
    """Let one process at a time compile for a folder: those that start together need the same.

    Who waits too long, for instance for a process that is stopped, compiles beside it.
    """
    late = time.monotonic() + _LONGEST_TURN
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # it has been removed meanwhile
        yield
        return
    try:
        while time.monotonic() < late:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
    finally:
        os.close(opened)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Raises RuntimeError if there is no folder to keep compiled code in."""

    def __init__(self, body: Callable[..., None], turn: contextlib.ExitStack) -> None:
        super().__init__(body)
        kept = self._impl
        stamp = kept.locator.get_source_stamp()
        self._cache_file = _Files(self._cache_path, kept.filename_base, stamp, turn)


def _compiled(signature: Any, body: Callable[..., None]) -> Any:
    options = {"fastmath": ARITHMETIC, "error_model": "numpy"}
    compiled: Any = CFunc(body, (signature.args, signature.return_type), {}, options)
    with contextlib.ExitStack() as turn:
        with contextlib.suppress(RuntimeError):  # it is compiled again at every start
            compiled._cache = _Cache(body, turn)
        compiled.compile()
    return compiled


def loop(body: Callable[[Any], None]) -> Loop:
    """Compile `body(address)` on first use of its module."""
    return Loop(body)


@intrinsic
def _call(typing_context: Any, function: Any, address: Any) -> Any:
    """Run a loop's body here."""

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del context, signature
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(operands[0], kind.as_pointer()), operands[1:])

    return types.void(types.int64, types.int64), generate


@intrinsic
def _call_team(typing_context: Any, team: Any, function: Any, address: Any, threads: Any) -> Any:
    """Run a loop's body on a team's threads."""

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del context, signature
        word, narrow = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [word, word, narrow, narrow])
        threads = builder.trunc(operands[3], narrow)
        given = [*operands[1:3], threads, ir.Constant(narrow, 0)]
        builder.call(builder.inttoptr(operands[0], kind.as_pointer()), given)

    return types.void(*[types.int64] * 4), generate


def _play(table, loops, team):
    calls = carray(pointer(table), (loops, 3), numba.int64)
    for i in range(loops):
        carray(pointer(calls[i, 1]), (1,), numba.int64)[_COUNTER] = 0
        if calls[i, 2] > 1:
            _call_team(team, calls[i, 0], calls[i, 1], calls[i, 2])
        else:
            _call(calls[i, 0], calls[i, 1])


@functools.cache
def _player() -> Any:
    return _compiled(types.void(*[types.int64] * 3), _play).ctypes


def player(calls: npt.NDArray[np.int64]) -> Callable[[], None]:
    """What runs loops one after the other.

    Args:
        calls: [n, 3], of each its address, that of its arguments, which stay there, and threads;
            to be kept for as long as it is called.
    """
    team: Any = _team()
    entry = 0 if team is None else ctypes.cast(team, ctypes.c_void_p).value
    return functools.partial(_player(), calls.ctypes.data, len(calls), entry)


@functools.cache
def _team() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded; None where it has none."""
    try:
        with open("/proc/self/maps") as lines:
            # Address, permissions, offset, device, inode, and a path that may hold spaces.
            mapped = {fields[5] for line in lines if len(fields := line.strip().split(None, 5)) > 5}
    except OSError:
        return None
    for path in sorted(mapped):
        if not Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            continue
        entry = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if entry is not None:
            entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            entry.restype = None
            return entry  # type: ignore[no-any-return]
    return None
