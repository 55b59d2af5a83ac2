"""Modules whose weights are numbers of 4 bits with an exponent (e2m1), in short groups of inputs.

compressed-tensors packs two in a byte, the first in its low half. Groups of MXFP4 have exponents of
two for scales (OCP Microscaling Formats, 2023); those of NVFP4 scales of 8 bits (e4m3), which one
number of the whole weight divides. Checkpoints may say that products round inputs to 4 bits, too:
they take them as they are, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layouts.floats import positive, scale_shapes
from tokenpod.models.layouts.module import StoredModule
from tokenpod.models.weights.mxfp4 import VALUES
from tokenpod.models.weights.weights import StoredTensor

_PACKED, _SCALE, _GLOBAL = ".weight_packed", ".weight_scale", ".weight_global_scale"


@dataclass(frozen=True, slots=True)
class Float4Scheme:
    """Of one module."""

    #: "mxfp4" or "nvfp4".
    format: str

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 32 if self.format == "mxfp4" else 16

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Numbers and scales, and what divides these."""
        kinds = ("U8",) if self.format == "mxfp4" else ("F8_E4M3",)
        found = {
            _PACKED: StoredTensor((outputs, inputs // 2), ("U8",)),
            _SCALE: StoredTensor((outputs, inputs // self.group), kinds),
        }
        return found | ({_GLOBAL: scale_shapes((1,), ())} if self.format == "nvfp4" else {})

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """What would scale inputs."""
        return {".input_global_scale": scale_shapes((1,), ())} if self.format == "nvfp4" else {}

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """Half a byte per number, a scale per group, the group of each input and the table."""
        groups = -(-len(inputs) // gcd(self.group, inputs.start))
        of_scale = 1 if self.format == "mxfp4" else 4
        rows = len(outputs) * (-(-len(inputs) // 2) + of_scale * groups)
        return rows + 4 * len(inputs) + VALUES.nbytes

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """These outputs and inputs; ModelError where scales are no positive numbers."""
        if module.inputs % self.group:
            raise ModelError(
                f"{module.name} has {module.inputs} inputs: {self.format} has groups of "
                f"{self.group}"
            )
        groups = range(inputs.start // self.group, -(-inputs.stop // self.group))
        read = range(groups.start * self.group, groups.stop * self.group)
        codes = module.read(_PACKED, outputs, range(read.start // 2, read.stop // 2))
        scale = module.read(_SCALE, outputs, groups)
        if self.format == "nvfp4":
            scale = scale.float() / self._global(module)
            if not bool((scale.isfinite() & (scale >= 0)).all()):
                raise ModelError(f"tensor {module.name}{_SCALE} holds what is no positive number")
        index = torch.arange(len(read), device=codes.device) // self.group
        weight = GroupedWeight(
            codes.contiguous(),
            scale.contiguous(),
            index.to(torch.int32),
            table=VALUES.to(codes.device),
        )
        own = range(inputs.start - read.start, inputs.stop - read.start)
        return weight if len(own) == len(read) else weight.inputs(own)

    def _global(self, module: StoredModule) -> torch.Tensor:
        scale = positive(module, _GLOBAL).reshape(())
        if not float(scale):
            raise ModelError(f"tensor {module.name}{_GLOBAL} is zero")
        return scale
