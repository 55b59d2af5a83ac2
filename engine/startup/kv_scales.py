"""Pools of 8 bits: their types, and the scales of those that have one for all tokens of a head.

A checkpoint may say it. Otherwise it is measured: a prompt of random tokens is run over a pool in
the model's own type, and each head gets a scale by which MARGIN times the largest number seen is
still held. Numbers of type e4m3 are as exact in the middle of their range as near its end, so a
wide margin costs nothing; scales are powers of two, so that scaling rounds nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import KVScales

#: Whose scales are known before tokens are. A pool of int8 has one for each head and token.
EIGHT_BITS = torch.float8_e4m3fn

#: What `kv_cache_dtype` calls pools of 8 bits, and their types.
POOL_TYPES = {"fp8_e4m3": EIGHT_BITS, "int8": torch.int8}

#: How many times the largest number seen fits, at least; because of the power of two, up to twice
#: as many.
MARGIN = 2.0

#: Tokens of the random prompt, if a step takes so many.
PROMPT_TOKENS = 1024


def random_prompt(tokens: int, vocab_size: int) -> list[int]:
    """The same in every process: ranks must agree on their tokens."""
    drawn: list[int] = np.random.default_rng(0).integers(vocab_size, size=tokens).tolist()
    return drawn


def measure_scales(pool: KVPool, slots: int) -> list[KVScales]:
    """Each layer's, by what lies in the first `slots` slots of a pool in the model's type."""
    layers = zip(pool.keys, pool.values, strict=True)
    return [KVScales(*(_scale(numbers[:slots]) for numbers in layer)) for layer in layers]


def _scale(numbers: torch.Tensor) -> torch.Tensor:
    """[K] float32: of each head of numbers [slots, K, D]."""
    largest = numbers.abs().amax(dim=(0, 2)).float()
    wanted = largest * MARGIN / torch.finfo(EIGHT_BITS).max
    # A head without any number but zero, or with one that is not finite, says nothing.
    known = wanted.isfinite() & (wanted > 0)
    return torch.where(known, torch.exp2(torch.log2(wanted).ceil()), 1.0)
