"""Which implementation of the operations a model gets, decided once."""

from __future__ import annotations

import torch

from tokenpod.kernels.operations.ops import Operations


def operations_for(device: torch.device, dtype: torch.dtype) -> Operations:
    """The fastest operations there are for weights of `dtype` on `device`, or the reference.

    Each implementation is imported only where it is used: compilers take their time.
    """
    if device.type == "cpu":
        from tokenpod.kernels.backends import cpu

        if dtype not in (torch.float32, torch.bfloat16):
            return cpu.OPERATIONS
        from tokenpod.kernels.backends import compiled

        return compiled.OPERATIONS
    if device.type == "cuda":
        from tokenpod.kernels.backends import triton

        return triton.OPERATIONS
    from tokenpod.kernels.backends import reference

    return reference.OPERATIONS
