"""What every product promises, whatever makes it: forms, formats, types, rows and ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from support.kernels.quantised_weights import KINDS
from tokenpod.kernels.operations.compose import (
    fused_add_linear,
    fused_norm_linear,
    laid_out,
    linear_of,
)
from tokenpod.kernels.operations.ops import Operations
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm

#: Tokens of a step: one, few, the most and one more than a table's tiles have had, many.
ROWS = (1, 4, 16, 64, 65, 256, 1024)
FORMS = ("plain", "normed", "gated", "added")
FORMATS: dict[str, Callable[[torch.Tensor], Any] | None] = {"dense": None, **KINDS}
#: Formats that round what they multiply: a number can become its other neighbour.
ROUNDED = ("fp8", "fp8-static", "fp8-blocks", "int8-rounded")
#: Ranks that divide a weight's inputs or outputs, and into how many parts.
RANKS = (("", 1), ("inputs", 2), ("outputs", 2), ("inputs", 3))


@dataclass(frozen=True)
class Case:
    """One product of so many tokens."""

    format: str
    form: str
    dtype: torch.dtype
    rows: int
    ranks: tuple[str, int]

    @property
    def normed(self) -> bool:
        """Whether a norm comes first."""
        return self.form in ("normed", "gated")

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        ranks = f"-{self.ranks[1]}-ranks-of-{self.ranks[0]}" if self.ranks[1] > 1 else ""
        return f"{self.format}-{self.form}-{dtype}-{self.rows}{ranks}"


def pairs(dtypes: list[torch.dtype], rows: tuple[int, ...] = ROWS) -> list[Case]:
    """Every format with every number of rows, and with every form, type and division somewhere."""
    cases = []
    for at, name in enumerate(FORMATS):
        for place, count in enumerate(rows):
            form = FORMS[(at + place) % len(FORMS)]
            ranks = RANKS[(at + 2 * place + place // 2) % len(RANKS)]
            if form == "gated" and ranks[0] == "inputs":
                ranks = RANKS[0]  # a gate comes after the sum
            dtype = dtypes[(at // 2 + place) % len(dtypes)]
            cases.append(Case(name, form, dtype, count, ranks))
    return cases


@dataclass(frozen=True)
class Outcome:
    """What came out, what should have, and how far any result of the type must be from that."""

    got: torch.Tensor
    exact: torch.Tensor

    @property
    def error(self) -> float:
        """‖got - exact‖ / ‖exact‖."""
        return _apart(self.got, self.exact)

    @property
    def least(self) -> float:
        """The error of the exact result, rounded once."""
        return _apart(self.exact.to(self.got.dtype), self.exact)


def made(
    case: Case,
    ops: Operations,
    device: torch.device,
    n: int,
    k: int,
    tokens: int | None = None,
    *,
    narrow: bool = False,
) -> Outcome:
    """The case's product over `tokens` of its rows (all) by these operations, ranks together.

    Ranks that divide inputs each round their part, whose sum is then rounded once more. With
    `narrow` the weight is what its numbers are in the inputs' type.
    """
    generator = torch.Generator().manual_seed(case.rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    gates = 2 if case.form == "gated" else 1
    x = (draw(case.rows, k) / 4).to(case.dtype)[:tokens]
    dense = draw(gates * n, k) / k**0.5
    make = FORMATS[case.format]
    weight = dense.to(case.dtype) if make is None else make(dense)
    bias = draw(gates * n).to(case.dtype)
    residual = draw(case.rows, n).to(case.dtype)[:tokens]
    norm = RowNorm((draw(k) / 8).to(case.dtype), 1e-5)
    divided, ranks = case.ranks
    if divided == "inputs":
        return _by_inputs(case, ops, x, weight, bias, residual, ranks, narrow)
    got, exact = [], []
    for part in _outputs(weight, gates, ranks if divided else 1):
        stored = _rows(weight, part)
        result, truth = _one(case, ops, x, stored, bias[part], residual, norm, part, narrow)
        got.append(result)
        exact.append(truth)
    return Outcome(torch.cat(got, 1), torch.cat(exact, 1))


def product_of(
    case: Case, ops: Operations, device: torch.device, n: int, k: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """The plain product with a weight, laid out, and inputs for it."""
    generator = torch.Generator().manual_seed(case.rows)
    x = torch.randn(case.rows, k, generator=generator).to(device).to(case.dtype)
    make = FORMATS[case.format]
    dense = torch.randn(n, k, generator=generator).to(device)
    weight = dense.to(case.dtype) if make is None else make(dense)
    return linear_of(ops, laid_out(ops, weight), None), x


def _one(
    case: Case,
    ops: Operations,
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor,
    residual: torch.Tensor,
    norm: RowNorm,
    part: torch.Tensor,
    narrow: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    held = laid_out(ops, weight)
    if case.form == "added":
        stream = residual[:, part].clone()
        add = fused_add_linear(ops, held, bias)
        exact = _exact(x, weight, bias, narrow)
        # Rounded before it is added, and once more behind.
        rounded = exact.to(case.dtype).double() + stream.double()
        if add is None:
            stream += linear_of(ops, held, bias)(x)
        else:
            add(x, stream)
        return stream, rounded
    if case.form == "plain":
        return linear_of(ops, held, bias)(x), _exact(x, weight, bias, narrow)
    activation = Activation.SILU if case.form == "gated" else None
    normed = ops.rms_norm(x, norm.weight, norm.epsilon)
    product = fused_norm_linear(ops, held, bias, norm, activation)
    if product is not None:
        got = product(x)
    else:
        got = linear_of(ops, held, bias)(normed)
        got = got if activation is None else ops.act_mul(got, activation)
    exact = _exact(normed, weight, bias, narrow)
    if activation is not None:
        gate, up = exact.chunk(2, 1)
        exact = functional.silu(gate) * up
    return got, exact


def _by_inputs(
    case: Case,
    ops: Operations,
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor,
    residual: torch.Tensor,
    ranks: int,
    narrow: bool,
) -> Outcome:
    k = x.shape[1]
    edges = [round(k * at / ranks / 32) * 32 for at in range(ranks + 1)]
    got = torch.zeros(len(x), len(bias), dtype=torch.float64, device=x.device)
    exact = got.clone()
    for rank, (first, end) in enumerate(itertools.pairwise(edges)):
        own = weight[:, first:end].contiguous() if isinstance(weight, torch.Tensor) else None
        stored = weight.inputs(range(first, end)) if own is None else own
        part = x[:, first:end].contiguous()
        its_bias = bias if rank == 0 else None
        got += linear_of(ops, laid_out(ops, stored), its_bias)(part).double()
        exact += _exact(part, stored, its_bias, narrow)
    return Outcome(got.to(case.dtype), exact)


def _outputs(weight: Any, gates: int, ranks: int) -> list[torch.Tensor]:
    """Outputs of each rank: its gates, and what they open."""
    n = weight.shape[0] // gates
    each = torch.arange(weight.shape[0]).view(gates, n)
    return [part.flatten() for part in each.tensor_split(ranks, dim=1)]


def _rows(weight: Any, part: torch.Tensor) -> Any:
    if isinstance(weight, torch.Tensor):
        return weight[part.to(weight.device)].contiguous()
    if len(part) == weight.shape[0]:
        return weight
    return weight.outputs(part.to(weight.scale.device))


def _exact(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, narrow: bool) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        exact = x.double() @ weight.double().t()
    else:
        rounded = weight.rounded_inputs(x.float()).double()
        wide = weight.dequantised(x.dtype if narrow else torch.float64)
        exact = rounded @ wide.double().t()
    return exact if bias is None else exact + bias.double()


def _apart(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Numbers that the type does not hold must be as infinite, and count for nothing else."""
    held = exact.to(got.dtype).isfinite()
    if not torch.equal(got[~held].double(), exact.to(got.dtype)[~held].double()):
        return math.inf
    return float((got[held].double() - exact[held]).norm() / exact[held].norm())
