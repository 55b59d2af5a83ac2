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


#: Names, GiB and compute capabilities.
_KNOWN = (
    ("t4", 14.56, (7, 5)),
    ("l4", 22.03, (8, 9)),
    ("a100-40", 39.38, (8, 0)),
    ("l40s", 44.39, (8, 9)),
    ("a100-80", 79.14, (8, 0)),
    ("h100", 79.10, (9, 0)),
    ("h200", 139.80, (9, 0)),
    ("b200", 178.35, (10, 0)),
)
GPUS = {name: Device(name, int(gib * GIB), capability) for name, gib, capability in _KNOWN}
