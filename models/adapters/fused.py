"""A checkpoint with one LoRA adapter fused into its weights, as they are read.

The sums are those of `tokenpod convert --lora`, in float32, experts, embedding, head, DoRA and
whole modules included. Each rank makes whole the tensors that the adapter changes, one at a time,
and takes its part of them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tokenpod.core.adapter_files import CONFIG, WEIGHTS
from tokenpod.models.adapters.config import read_lora
from tokenpod.models.adapters.lora import merged
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.checkpoints.writer import Planned
from tokenpod.models.weights.weights import Stack

_REAL = (torch.float32, torch.float16, torch.bfloat16)


class FusedCheckpoint(Checkpoint):
    """The base in `folder` with the LoRA adapter in `adapter`.

    Raises ModelError as `Checkpoint`, for a config that is not understood, and for an adapter of
    another base: of weights that there are not, that have other shapes, or that are quantised.
    """

    def __init__(self, folder: Path, adapter: Path) -> None:
        super().__init__(folder)
        self._name: str | None = None
        self._made = torch.empty(0)
        try:
            self._changed = self._plan(adapter)
        except BaseException:
            self._files.close()
            raise

    def read_into(
        self,
        target: torch.Tensor,
        name: str,
        axis: int | None = None,
        part: range = range(0),
        stack: Stack | None = None,
    ) -> None:
        """Read a tensor as the base has it, with the adapter's change where there is one."""
        planned = self._changed.get(name)
        if planned is None:
            super().read_into(target, name, axis, part, stack)
            return
        if stack is not None:
            raise ModelError(f"{name} is a stack of experts, into which no adapter is fused")
        if self._name != name:
            # Parts of a fused tensor are asked for one after the other.
            self._name, self._made = name, planned.read()
        made = self._made
        target.copy_(made if axis is None else made.narrow(axis, part.start, len(part)))

    def _plan(self, adapter: Path) -> dict[str, Planned]:
        """The tensors that the adapter changes."""
        if not (adapter / CONFIG).is_file():
            raise ModelError(f"{adapter}: there is no {CONFIG}: it is no adapter in PEFT's layout")
        if not (adapter / WEIGHTS).is_file():
            raise ModelError(f"{adapter}: there is no {WEIGHTS}")
        fields = read_fields(adapter / CONFIG)
        fields.only("peft_type", "LORA")
        read_lora(fields, whole=True)
        base = [
            Planned(name, self.dtype(name), self.shape(name), partial(self._stored, name))
            for name in sorted(self.names)
            if self.dtype(name) in _REAL
        ]
        made = zip(base, merged(base, adapter), strict=True)
        return {before.name: after for before, after in made if after is not before}

    def _stored(self, name: str) -> torch.Tensor:
        target = torch.empty(self.shape(name), dtype=self.dtype(name))
        super().read_into(target, name)
        return target
