"""Products with weights of 4 bits, or of 8 in groups: which kernel makes them, for how many tokens.

Weights are put into lanes once and held so alone. Few tokens: `lane_products`; more, bound by
arithmetic: the library's product with a float copy of the weight.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.gpu.launch import capability
from tokenpod.kernels.pointwise.triton_pointwise import rms_norm
from tokenpod.kernels.products.quantised.around import Around, Product, put
from tokenpod.kernels.products.quantised.lane_products import multiply_lanes
from tokenpod.kernels.products.quantised.lanes import Lanes
from tokenpod.kernels.products.quantised.quantised_tiles import LaneTile, Tiles, TokenTile, measured
from tokenpod.kernels.products.quantised.token_product import multiply_token, token_of
from tokenpod.kernels.products.quantised.widen import widen_lanes


def prepare_lanes(
    made: Lanes, bias: torch.Tensor | None, around: Around, tiles: Tiles | None
) -> Product:
    """The product with a weight in lanes."""
    kind = kind_of_lanes(made)
    # Whole numbers of 4 bits without zeros, and blocks without anything beyond the last input.
    whole = kind == "int4" and made.zero is None
    full = made.inputs % (made.planes * made.width) == 0
    but = None if whole and full else TokenTile
    chosen = tiles or measured(capability(made.numbers.device))

    def product(x: torch.Tensor, y: torch.Tensor) -> None:
        few = x.itemsize <= 2
        tile = chosen.choose(kind, made.rows, made.inputs, len(x), but=but) if few else None
        norm = around.norm
        # A launch or a program that rounds norms too, where it has inputs in their order.
        if norm is not None and (made.order is not None or not isinstance(tile, TokenTile)):
            x, norm = rms_norm(x, norm.weight, norm.epsilon), None
        if made.order is not None:
            x = x.index_select(1, made.order)
        if isinstance(tile, TokenTile):
            token = token_of(x, None, norm, tile, made.width)
            multiply_token(
                *(token, norm, kind, made.numbers, made.scale),
                *(bias, y, around.activation, around.add, tile),
                width=made.width,
                group=made.group,
            )
        elif isinstance(tile, LaneTile):
            multiply_lanes(x, made, bias, y, around.activation, around.add, tile)
        else:
            put(functional.linear(x, widen_lanes(made, x.dtype), bias), y, around)

    return product


def kind_of_lanes(weight: Lanes) -> str:
    """The name under which its tiles are."""
    return "groups8" if weight.kind == "int8" else weight.kind
