"""Products whose partial sums ranks sum, and ranks as processes that do so by turns.

In a module that a fresh process can import.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from triton.runtime import interpreter

from support.kernels.interpreted import DEVICE
from tokenpod.kernels.gpu.peers import BLOCK, SymmetricBuffers
from tokenpod.kernels.products import triton_product as product
from tokenpod.kernels.products.product_tiles import Kind, Tile

MULTIPLY_ADD = Tile(Kind.MULTIPLY_ADD, block_n=4, block_k=64, warps=2)
MATRIX = Tile(Kind.MATRIX, block_n=32, block_k=32, warps=2, stages=3)
#: Inputs: no multiple of what a program takes at a time.
K = 72
TURNS = 24
#: Words that ranks send each other at a time of long sums.
LONG = 2 * BLOCK


@dataclass
class Sum:
    """What each rank has of one sum."""

    inputs: list[torch.Tensor]
    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    residual: torch.Tensor

    @staticmethod
    def draw(world, tokens, n, *, dtype=torch.bfloat16, bias=False, seed=0) -> Sum:
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape):
            return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

        return Sum(
            [numbers(tokens, K) for _ in range(world)],
            [numbers(n, K) for _ in range(world)],
            [numbers(n) if bias and rank == 0 else None for rank in range(world)],
            numbers(tokens, n),
        )

    def partial(self, rank: int, tile: Tile) -> torch.Tensor:
        made = torch.empty_like(self.residual)
        product.multiply(self.inputs[rank], self.weights[rank], self.biases[rank], made, tile)
        return made


def turn_of(turn: int, world: int) -> tuple[bool, Tile, Sum]:
    """Whether the sum is made where the product ends; with which tile; of what."""
    draw = np.random.default_rng(turn)
    tokens, features = int(draw.integers(1, 6)), 18 * int(draw.integers(1, 6))
    tile = (MULTIPLY_ADD, replace(MULTIPLY_ADD, block_n=16), MATRIX)[draw.integers(3)]
    each = Sum.draw(world, tokens, features, dtype=torch.float16, seed=turn)
    return bool(draw.random() < 0.8), tile, each


def long_partial(turn: int, rank: int) -> torch.Tensor:
    """A rank's summand, of up to three times what the buffers for it hold."""
    words = int(np.random.default_rng(turn).integers(1, 3 * LONG))
    generator = torch.Generator().manual_seed(2 * turn + rank)
    return torch.randn(words, generator=generator).to(DEVICE)


def _read_late(seed: int) -> None:
    """Now and then, wait before a message is looked for: long enough for the others to go on.

    And always for a moment, in which the others have the processor.
    """
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load
    draw = random.Random(seed)

    def late(self, pointers, mask, other, cache, eviction, is_volatile):
        if is_volatile:
            time.sleep(0.1 if draw.random() < 0.05 else 0.0005)
        return load(self, pointers, mask, other, cache, eviction, is_volatile)

    builder.create_masked_load = late


def follow_turns(job: tuple[int, int, torch.Tensor, torch.Tensor]) -> list[np.ndarray]:
    """One rank's results: of each turn a product's sum, then a long one.

    Args:
        job: the rank, how many there are, and their memory: [two kinds of buffers, receiver, half,
            sender, word] and [receiver, words of the buffer for long sums].
    """
    rank, world, memory, others = job
    torch.set_num_threads(1)
    _read_late(rank)
    addresses = [[buffer.data_ptr() for buffer in buffers] for buffers in (*memory, others)]
    behind = SymmetricBuffers.at(addresses[0], rank, memory.shape[-1], DEVICE)
    at_the_end = SymmetricBuffers.at(addresses[1], rank, memory.shape[-1], DEVICE, together=1)
    long = SymmetricBuffers.at(addresses[2], rank, LONG, DEVICE)
    totals = []
    for turn in range(TURNS):
        joined, tile, each = turn_of(turn, world)
        total = each.residual.clone()
        if joined:
            x, weight = each.inputs[rank], each.weights[rank]
            product.multiply(x, weight, None, total, tile, buffers=at_the_end)
        else:
            behind.add(each.partial(rank, tile), total)
        totals.append(total.numpy())
        total = long_partial(turn, rank)
        long.sum(total)
        totals.append(total.numpy())
    return totals
