"""Where a family's checkpoints have the weights of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from tokenpod.models.weights import Axis, Segment, Source, Stack

if TYPE_CHECKING:
    from tokenpod.models.names import Fused


class Half(Enum):
    """Which rows of a tensor that holds gates and what they open."""

    FIRST = "first"
    SECOND = "second"
    EVEN = "even"
    ODD = "odd"


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A weight of every expert: a tensor each if its name has `{e}`, otherwise all in one."""

    #: Whole, with `.weight` if it has that.
    name: str
    half: Half | None = None
    #: All in one: without an axis that counts experts.
    flat: bool = False
    #: [in, out].
    transposed: bool = False
    #: Of numbers of 4 bits: the tensor with their scales.
    scales: str = ""
    #: The tensor with its bias, if experts have one.
    bias: str = ""

    def source(self, at: str, expert: int, count: int, axes: tuple[Axis, ...]) -> Source:
        """One expert's."""
        return Source(
            at + self.name.format(e=expert),
            axes,
            self._segment(axes[0].length),
            transposed=self.transposed,
            stack=None if "{e}" in self.name else Stack(expert, count, self.flat),
            scales=at + self.scales if self.scales else None,
        )

    def bias_source(self, at: str, expert: int, count: int, rows: Axis) -> Source:
        """One expert's."""
        segment, stack = self._segment(rows.length), Stack(expert, count)
        return Source(at + self.bias, (rows,), segment, stack=stack)

    def _segment(self, rows: int) -> Segment | None:
        if self.half is None:
            return None
        if self.half in (Half.FIRST, Half.SECOND):
            return Segment((rows, rows), int(self.half is Half.SECOND))
        return Segment((1, 1), int(self.half is Half.ODD), rows)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Of a mixture."""

    router: str
    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor
    #: Whole; a tensor [experts] or [1, experts].
    correction: str = ""
    correction_rows: bool = False
    shared_up: tuple[str, ...] | Fused = ()
    shared_down: str = ""
    shared_gate: str = ""

    def stacked(self, gate_up: str, down: str, **other: Any) -> ExpertNames:
        """The same with all experts' weights in two tensors [experts, out, in], and `other`."""
        gate, up = ExpertTensor(gate_up, Half.FIRST), ExpertTensor(gate_up, Half.SECOND)
        return replace(self, gate=gate, up=up, down=ExpertTensor(down), **other)

    def transposed(self) -> ExpertNames:
        """The same with experts' weights as [in, out]."""
        gate, up, down = (replace(x, transposed=True) for x in (self.gate, self.up, self.down))
        return replace(self, gate=gate, up=up, down=down)


def experts_apart(
    router: str, expert: str, gate: str, up: str, down: str, **other: Any
) -> ExpertNames:
    """A tensor for each weight of each expert, whose names begin with `expert` (with `{e}`)."""
    each = [ExpertTensor(f"{expert}.{name}.weight") for name in (gate, up, down)]
    return ExpertNames(router, each[0], each[1], each[2], **other)
