"""Which implementation of the operations a device gets, decided once."""

from __future__ import annotations

import torch

from tokenpod.kernels import cpu, reference
from tokenpod.kernels.ops import Operations


def operations_for(device: torch.device) -> Operations:
    """The fastest operations there are for `device`: its own, or else the reference."""
    if device.type == "cpu":
        return cpu.OPERATIONS
    return reference.OPERATIONS
