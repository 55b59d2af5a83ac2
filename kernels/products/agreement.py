"""For which numbers of tokens the vendor's library yields what one sum along k yields, bit by bit.

Its kernels are faster than ours, but some of them, which it chooses for few tokens, divide a sum
between programs. Which they are it does not tell, and an order of additions shows in the results:
so both multiply random numbers, for every number of tokens, before any request is served.
"""

from __future__ import annotations

from functools import cache

import torch

from tokenpod.kernels.products import library
from tokenpod.kernels.products.product_tiles import FEW_TOKENS, DeterministicTiles
from tokenpod.kernels.products.triton_product import multiply

#: Numbers of tokens that are asked about. Above, ours take 2 to 6 % longer on an H200.
_TOKENS = range(FEW_TOKENS // 2 + 1, 1025)


def agreeing(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: DeterministicTiles, *, add: bool
) -> frozenset[int]:
    """Numbers of tokens whose products with weights of this shape agree, added to a sum or not.

    Once per shape. None but on a GPU, for numbers of 2 bytes.
    """
    if not weight.is_cuda or weight.itemsize != 2:
        return frozenset()
    how = (weight.dtype, weight.device, tiles.shared_bytes)
    return _agreeing(*weight.shape, *how, biased=bias is not None, add=add)


@cache
def _agreeing(
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    shared_bytes: int,
    *,
    biased: bool,
    add: bool,
) -> frozenset[int]:
    with torch.inference_mode():
        made = library.stand_in(n, k, dtype, device, _TOKENS)
        if made is None:
            return frozenset()
        draw = torch.Generator(device).manual_seed(0)
        made.x.normal_(generator=draw)
        made.weight.normal_(0, k**-0.5, generator=draw)
        bias = made.weight.new_empty(n).normal_(generator=draw) if biased else None
        before = made.x.new_empty((len(made.x), n)).normal_(generator=draw) if add else None
        want = torch.empty((len(made.x), n), dtype=dtype, device=device)
        if before is not None:
            want.copy_(before)
        tile = DeterministicTiles({}, [], False, shared_bytes).choose(n, k, len(made.x))
        multiply(made.x, made.weight, bias, want, tile, add=add)
        differ = torch.zeros(len(made.x) + 1, dtype=torch.bool, device=device)
        for t in made.tokens:
            residual = None if before is None else before[:t].clone()
            got = library.multiply(made.x[:t], made.weight, bias, residual)
            differ[t] = (got != want[:t]).any()
        differs = differ.tolist()
    return frozenset(t for t in made.tokens if not differs[t])
