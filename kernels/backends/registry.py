"""Which implementation of the operations a model gets, decided once."""

from __future__ import annotations

import torch

from tokenpod.kernels.ops import Operations


def operations_for(device: torch.device, dtype: torch.dtype) -> Operations:
    """The fastest operations there are for weights of `dtype` on `device`, or the reference.

    Each implementation is imported only where it is used: compilers take their time.
    """
    if device.type == "cpu":
        from tokenpod.kernels import cpu

        return cpu.operations_for(dtype)
    if device.type == "cuda":
        from tokenpod.kernels import triton

        return triton.OPERATIONS
    from tokenpod.kernels import reference

    return reference.OPERATIONS
