"""What weights of a checkpoint become: numbers and scales, as compressed-tensors stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tokenpod.kernels.products.formats.fp8 import MOST as MOST_FP8
from tokenpod.models.layouts.packing import words

#: Inputs that share a scale, where nothing else is asked for.
GROUP = 128


@dataclass(frozen=True, slots=True)
class Target:
    """A format that a checkpoint is written in: whole numbers, or e4m3."""

    name: str
    #: Of each number.
    bits: int
    #: Whether numbers have an exponent.
    floating: bool
    #: Inputs of a group; None: all of an output's.
    group: int | None

    def length(self, inputs: int) -> int:
        """Inputs that share a scale."""
        return self.group or inputs

    def scales(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of a weight [out, in] float32 -> [out, groups] in `dtype`, none of them zero."""
        outputs, inputs = weight.shape
        most = weight.view(outputs, -1, self.length(inputs)).abs().amax(2)
        if self.floating:
            scale = most / MOST_FP8
        elif self.bits == 8:
            scale = most / 127
        else:
            # The largest number is half a step off, as any other may be.
            scale = most / ((1 << self.bits - 1) - 0.5)
        return torch.where(scale > 0, scale, 1.0).to(dtype)

    def rounded(self, shares: torch.Tensor) -> torch.Tensor:
        """Weights divided by their scales -> the nearest numbers, as float32."""
        if self.floating:
            return shares.clamp(-MOST_FP8, MOST_FP8).to(torch.float8_e4m3fn).float()
        most = (1 << self.bits - 1) - 1
        return shares.round().clamp(-most if self.bits == 8 else -most - 1, most)

    def declared(
        self, outputs: int, inputs: int, dtype: torch.dtype
    ) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of a module's tensors, by the endings of their names."""
        scale = dtype, (outputs, inputs // self.length(inputs))
        if self.floating:
            return {
                ".weight": (torch.float8_e4m3fn, (outputs, inputs)),
                ".weight_scale": scale,
            }
        return {
            ".weight_packed": (torch.int32, (outputs, words(inputs, self.bits))),
            ".weight_scale": scale,
            ".weight_shape": (torch.int64, (2,)),
        }

    def tensors(self, numbers: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same, of numbers [out, in] float32 and scales [out, groups]."""
        if self.floating:
            return {".weight": numbers.to(torch.float8_e4m3fn), ".weight_scale": scale}
        return {
            ".weight_packed": packed(numbers.to(torch.int32) + (1 << self.bits - 1), self.bits),
            ".weight_scale": scale,
            ".weight_shape": torch.tensor(numbers.shape),
        }

    def config(self, ignore: list[str], *, ordered: bool) -> dict[str, Any]:
        """`quantization_config`; `ordered`: inputs were rounded in the order of their weight."""
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": "float" if self.floating else "int",
            "symmetric": True,
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "dynamic": False,
            "actorder": "weight" if ordered and self.group is not None else None,
        }
        inputs: dict[str, Any] | None = None
        if self.floating:
            inputs = {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if self.floating else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }


def target_of(name: str, group: int | None) -> Target:
    """By the name of a format; `group`: inputs that share a scale, of int4 alone."""
    if name == "int4":
        return Target(name, 4, floating=False, group=group or GROUP)
    return Target(name, 8, floating=name == "fp8", group=None)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers [out, in] from 0 on -> words [out, in · bits / 32] int32, lowest bits first."""
    per_word = 32 // bits
    wide = functional.pad(numbers, (0, -numbers.shape[1] % per_word))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=numbers.device)
    # The bits do not overlap, so their sum is what they are together, the sign included.
    return (wide.view(len(wide), -1, per_word) << shifts).sum(2, dtype=torch.int32)
