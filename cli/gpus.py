"""GPUs by name, with the memory that their driver gives to programs."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.core.capability import Capability

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU."""

    name: str
    #: What a program sees as the device's memory: a few per cent less than what is on the box.
    gib: float
    capability: Capability

    @property
    def memory(self) -> int:
        """Bytes of it."""
        return int(self.gib * GIB)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4", 14.56, (7, 5)),
        Gpu("l4", 22.03, (8, 9)),
        Gpu("a100-40", 39.38, (8, 0)),
        Gpu("l40s", 44.39, (8, 9)),
        Gpu("a100-80", 79.14, (8, 0)),
        Gpu("h100", 79.10, (9, 0)),
        Gpu("h200", 139.80, (9, 0)),
        Gpu("b200", 178.35, (10, 0)),
    )
}
