"""What starts measure, kept beside the kernels for starts that would measure the same.

Steps that are measured before a pod serves take two seconds. What comes of them follows from the
package, the model's settings, the options and the machine, whose digest is the name of a file that
holds it. Under any other conditions there is another file. What does not fit is forgotten.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.startup.conditions import conditions, write_whole
from tokenpod.kernels.operations.group import Group
from tokenpod.scheduler.steps.machine_times import StepSize

T = TypeVar("T")

#: Bytes of code that is loaded at most; where more is gone, others have taken it.
MOST_CODE = 2 << 30
#: Where the driver says its version.
_DRIVER = Path("/proc/driver/nvidia/version")


class Measured(msgspec.Struct, frozen=True):
    """What the first steps of a start show."""

    #: Bytes that torch keeps of the GPU's memory for the largest step.
    step: int
    #: Bytes by which free memory fell meanwhile: code that was loaded is in them.
    taken: int
    #: Sizes of plain steps, and their seconds.
    times: list[tuple[StepSize, float]]
    #: By product, numbers of tokens for which the vendor's library loads kernels.
    library: dict[str, list[int]] = {}


class Kept:
    """What was measured under some conditions, if it was.

    Args:
        options: those that steps follow from.
        machine: name, memory and driver of the GPU, or whatever else it is known by.
        folder: that of the kernels.
    """

    def __init__(self, options: EngineOptions, machine: Sequence[object], folder: Path) -> None:
        #: A model without a folder may be any.
        self._known = bool(options.model_folder)
        place = options.placement
        rank = (place.rank, place.world) if place is not None else (0, 1)
        alike = msgspec.structs.replace(
            options, model_folder="", device="cuda", questions_fd=-1, placement=None
        )
        digest = hashlib.sha256(msgspec.msgpack.encode(alike))
        digest.update(repr([*machine, *rank]).encode())
        for each in filter(None, (options.model_folder, options.draft_folder)):
            digest.update(conditions(Path(each)))
        self._file = folder / f"tokenpod-{digest.hexdigest()[:32]}.steps"

    def read(self) -> Measured | None:
        """None: nothing is kept, or nothing that can be read."""
        if not self._known:
            return None
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Measured)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, measured: Measured) -> None:
        """Keep it, unless others took memory meanwhile, or the folder can't be written."""
        if not self._known or measured.taken - measured.step > MOST_CODE:
            return
        with contextlib.suppress(OSError):
            write_whole(self._file, msgspec.json.encode(measured).decode())

    def forget(self) -> None:
        """Let the next start measure."""
        with contextlib.suppress(OSError):
            self._file.unlink()

    def used(self, start: Callable[[Measured | None], T], group: Group | None = None) -> T:
        """What `start` makes of what is kept; if that does not fit, or there is nothing, of None.

        It does not fit where that raises EngineError or torch.OutOfMemoryError. Ranks of a group
        take what is kept if all have it, and start together: where it does not fit it is forgotten,
        the error is raised, and the next start measures.
        """
        measured = self.read()
        if group is not None and not group.least(int(measured is not None)):
            measured = None
        if measured is not None:
            try:
                return start(measured)
            except (EngineError, torch.OutOfMemoryError):
                # Perhaps a step takes more than was kept, perhaps there is less memory: see anew.
                self.forget()
                if group is not None:
                    raise
            gc.collect()
            torch.cuda.empty_cache()  # where CUDA is not used, it does nothing
        return start(None)


def kept_of(options: EngineOptions, device: torch.device) -> Kept:
    """What was measured on this machine's GPU."""
    from triton import knobs

    found = torch.cuda.get_device_properties(device)
    driver = _DRIVER.read_text() if _DRIVER.exists() else ""
    return Kept(options, (found.name, found.total_memory, driver), Path(knobs.cache.dir))
