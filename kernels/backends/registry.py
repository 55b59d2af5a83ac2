"""Which implementation of the operations a model gets, decided once.

Each implementation is imported only where it is used: compilers take their time.
"""

from __future__ import annotations

import torch

from tokenpod.kernels.operations.ops import Operations


def operations_for(device: torch.device) -> Operations:
    """The fastest operations there are on `device`, or the reference."""
    if device.type == "cpu":
        from tokenpod.kernels.backends import cpu

        return cpu.OPERATIONS
    if device.type == "cuda":
        from tokenpod.kernels.backends import triton

        return triton.OPERATIONS
    from tokenpod.kernels.backends import reference

    return reference.OPERATIONS


def deterministic_operations() -> Operations:
    """Those for a GPU whose results for a token are the same, bit by bit, in any step."""
    from tokenpod.kernels.backends import triton

    return triton.DETERMINISTIC
