"""How kernels of one stream follow each other.

By default a kernel starts when the one before has ended, and a few microseconds of memory time are
lost at each seam. From compute capability 9.0 on, a kernel may start early (programmatic dependent
launch) and wait inside. The rules that keep this right:

- every program of an overlapping kernel calls `await_inputs` before it reads or writes anything
  that another kernel writes: also outputs, which an earlier kernel may still read;
- before that it may touch only what no overlapping kernel writes: weights, and the step's integers
  and row table. Those are there, because the kernel behind the one that makes them does not start
  early: in a chain of overlapping kernels, the first starts when all before it have ended;
- it may ask anything into the L2 cache, which is where the device's memory is kept coherent;
- no program returns early. A kernel that has waited has also waited for all before its predecessor,
  so any chain is in order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: The first compute capability whose kernels can start before their predecessor has ended.
OVERLAPPING_CAPABILITY = (9, 0)
#: Bytes of shared memory that a program can have: A100 and H100, and the least of others.
SHARED_BYTES = {(8, 0): 163 << 10, (9, 0): 227 << 10}
LEAST_SHARED_BYTES = 99 << 10


class LaunchOptions(TypedDict, total=False):
    """Keyword arguments of a kernel that calls `await_inputs`."""

    OVERLAP: bool
    launch_pdl: bool


class Gpu(NamedTuple):
    """What kernels are shaped by."""

    #: Compute capability: its generation.
    capability: tuple[int, int]
    #: Streaming multiprocessors.
    processors: int


#: What tensors without memory (of device "meta") stand for; nothing until `stand_in`.
_STANDS_FOR: list[Gpu] = []


def stand_in(gpu: Gpu) -> None:
    """Let tensors without memory be those of `gpu`, for as long as this process lives.

    For a process that only finds out which kernels such a GPU would be asked for: what depends on
    a device is chosen as it would be there.
    """
    assert not _STANDS_FOR, "a process stands in for one GPU"
    _STANDS_FOR.append(gpu)


@cache
def gpu_of(device: torch.device) -> Gpu | None:
    """A device's facts; None where kernels are interpreted."""
    if device.type == "meta":
        return _STANDS_FOR[0]
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return Gpu((found.major, found.minor), found.multi_processor_count)


def capability(device: torch.device) -> tuple[int, int] | None:
    """What generation of GPU this is; None where kernels are interpreted."""
    gpu = gpu_of(device)
    return None if gpu is None else gpu.capability


@cache
def launch_options(device: torch.device) -> LaunchOptions:
    """Overlapping where the device can; facts of a device don't change."""
    generation = capability(device)
    return options(generation is not None and generation >= OVERLAPPING_CAPABILITY)


def options(overlap: bool) -> LaunchOptions:
    """As launch arguments; the interpreter does not know `launch_pdl`."""
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


def most_stages(device: torch.device, step: int) -> int:
    """How many steps of so many bytes a multiprocessor holds, one at least."""
    return max(shared_bytes(device) // step, 1)


def shared_bytes(device: torch.device) -> int:
    """Of shared memory, that a program can have."""
    return SHARED_BYTES.get(capability(device) or OVERLAPPING_CAPABILITY, LEAST_SHARED_BYTES)


@triton.jit
def settled(sums, ASSEMBLY: tl.constexpr):
    """Sums [R, C] float32 of a step, once its multiplication has ended.

    The matrix unit reads a left factor from registers for as long as it multiplies, and the
    compiler gives the next step's numbers the same registers. Where sums are only added to,
    Triton lets steps overlap, and numbers are overwritten before they are multiplied. What looks
    at the sums here makes it wait; no instruction is left of it.
    """
    if ASSEMBLY:
        sums = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1
        )
    return sums


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Let the next kernel start as soon as there is room; wait for the one before.

    That one has waited for the one before it, and so on. But until here none of them need have
    ended: what a few launches before write is not to be read above this line.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def ask_lines(at):
    """Ask the line at each address into the L2 cache; addresses are of the device's memory."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
