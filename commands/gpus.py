"""Devices that a model can run on, and GPUs by name."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.core.capability import Capability
from tokenpod.core.capacity import GIB


@dataclass(frozen=True, slots=True)
class Device:
    """What a model is to run on."""

    name: str
    #: Bytes that a program sees: of a GPU a few per cent less than what is on the box.
    memory: int
    #: None where it is not known.
    capability: Capability | None = None
    #: Of its memory, in GB/s; None where it is not known.
    bandwidth: int | None = None


#: Names, GiB, compute capabilities and GB/s. Memory is what CUDA tells programs on Linux, with ECC
#: where a card is sold with it on. GB/s are of SXM modules where there are several; where each
#: comes from is in docs/sizing.md.
_KNOWN = (
    ("t4", 14.56, (7, 5), 320),
    ("l4", 22.03, (8, 9), 300),
    ("a10g", 21.98, (8, 6), 600),
    ("a100-40", 39.38, (8, 0), 1555),
    ("l40s", 44.39, (8, 9), 864),
    ("a100-80", 79.14, (8, 0), 2039),
    ("h100", 79.10, (9, 0), 3350),
    ("h200", 139.80, (9, 0), 4800),
    ("b200", 178.35, (10, 0), 8000),
    ("rtx-3090", 23.69, (8, 6), 936),
    ("rtx-4090", 23.61, (8, 9), 1008),
    ("rtx-5090", 31.36, (12, 0), 1792),
    ("rtx-6000-ada", 44.43, (8, 9), 960),
    ("rtx-pro-6000", 94.97, (12, 0), 1792),
)
GPUS = {
    name: Device(name, int(gib * GIB), capability, bandwidth)
    for name, gib, capability, bandwidth in _KNOWN
}
