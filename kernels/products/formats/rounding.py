"""How a format rounds what it multiplies, where it does: inputs of 8 bits with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch


class Number(Enum):
    """What an input is rounded to."""

    #: A sign, 4 bits of exponent, 3 of mantissa, no infinities (e4m3fn, Micikevicius 2022).
    FP8 = "fp8"
    #: A whole number within ±127.
    INT8 = "int8"

    @property
    def dtype(self) -> torch.dtype:
        """Of the rounded numbers."""
        return torch.float8_e4m3fn if self is Number.FP8 else torch.int8

    @property
    def most(self) -> float:
        """The largest number."""
        return 448.0 if self is Number.FP8 else 127.0


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a product rounds its inputs to before it multiplies them.

    Scales follow from each token's numbers, so that a token's result does not depend on the others
    of its step; or there is one for all, which the checkpoint brings.
    """

    number: Number
    #: Inputs of a token that share a scale, from its first input on; None: all of them.
    group: int | None = None
    #: [] float32: the scale of all inputs; None: the largest number of a token, or of its group,
    #: becomes the largest of the format.
    static: torch.Tensor | None = None

    def rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """X [T, in] -> numbers [T, in] of the dtype, and scales [T, groups] float32.

        A token that holds a number that is none, or is infinite, gets a scale that is none, so
        that its products show it.
        """
        tokens, inputs = x.shape
        group = self.group or max(inputs, 1)
        groups = -(-inputs // group)
        wide = x.float()
        if groups * group != inputs:
            wide = torch.nn.functional.pad(wide, (0, groups * group - inputs))
        wide = wide.view(tokens, groups, group)
        if self.static is None:
            scale = wide.abs().amax(2) / self.number.most
        else:
            scale = self.static.expand(tokens, groups)
        shares = wide / torch.where(scale > 0, scale, 1.0)[:, :, None]
        shares = shares.nan_to_num(0.0).clamp(-self.number.most, self.number.most)
        if self.number is Number.INT8:
            shares = shares.round()
        numbers = shares.to(self.number.dtype).view(tokens, -1)[:, :inputs]
        return numbers, scale if self.static is None else _none_where_lost(scale, wide)

    def applied(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, in] -> what the rounded numbers stand for [T, in] float32."""
        numbers, scale = self.rounded(x)
        group = self.group or max(x.shape[1], 1)
        return numbers.float() * scale.repeat_interleave(group, 1)[:, : x.shape[1]]


def alike(roundings: Sequence[Rounding | None]) -> bool:
    """Whether products that round their inputs so can be one."""
    kinds = {
        each and (each.number, each.group, each.static is None) for each in roundings
    }  # fmt: skip
    return len(kinds) == 1


def joined(roundings: Sequence[Rounding | None]) -> Rounding | None:
    """For one product instead of several `alike`: of given scales, the largest."""
    known = [each for each in roundings if each is not None]
    if not known or known[0].static is None:
        return roundings[0]
    scales = [each.static for each in known if each.static is not None]
    return replace(known[0], static=torch.stack(scales).amax(0))


def _none_where_lost(scale: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """A given scale, but no number where clamping would hide one that is none."""
    return torch.where(wide.isfinite().all(2), scale, torch.nan)
