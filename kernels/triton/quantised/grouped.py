"""Products with weights of 8 bits in groups, or of 4 bits that stand for numbers of a table.

They are repacked once and held so alone. Few tokens: tiles are widened in registers; more: the
library's product with a float copy of the weight.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.formats.grouped import GroupedWeight
from tokenpod.kernels.triton.launch import capability
from tokenpod.kernels.triton.pointwise import act_mul, rms_norm
from tokenpod.kernels.triton.quantised.around import Around, Product, start_from
from tokenpod.kernels.triton.quantised.stored_products import multiply_stored, widen_stored
from tokenpod.kernels.triton.quantised.tiles import StoredTile, Tiles, measured
from tokenpod.kernels.triton.quantised.walked import Walked, walked


def prepare_grouped(
    weight: GroupedWeight, bias: torch.Tensor | None, around: Around, tiles: Tiles | None
) -> Product | None:
    """The product with a weight; None: its groups are not regular, or too short for the kernels."""
    made = walked(weight)
    if made is None:
        return None
    kind, n = kind_of_walked(made), weight.shape[0]
    chosen = tiles or measured(capability(made.numbers.device))

    def product(x: torch.Tensor, y: torch.Tensor, delta: torch.Tensor | None) -> None:
        tile = None if x.itemsize > 2 else chosen.choose(kind, n, made.inputs, len(x))
        if around.norm is not None:
            x = rms_norm(x, around.norm.weight, around.norm.epsilon)
        if isinstance(tile, StoredTile):
            start_from(
                delta,
                y,
                around,
                lambda out, gate, add: multiply_stored(x, made, bias, out, gate, add, tile),
            )
            return
        out = functional.linear(x, widen_stored(made, x.dtype), bias)
        if delta is not None:
            out += delta
        if around.activation is not None:
            out = act_mul(out, around.activation)
        if around.add:
            y += out
        else:
            y.copy_(out)

    return product


def kind_of_walked(weight: Walked) -> str:
    """The name under which its tiles are."""
    return "groups8" if weight.planes == 1 else "codes4"
