"""Sums over ranks where the products of their shards end, without a launch of their own.

A program of such a product has some outputs of this rank. It sends them to the other ranks'
buffers, waits for theirs of the same outputs, and adds the sum to the residual stream, all in the
words of `peers`. Outputs are rounded before they travel and before they are summed, in the order of
ranks: bit by bit what the product alone and `SymmetricBuffers.add` behind it yield.

Word token · n/2 + row/2 holds outputs `row` and `row + 1` of a token, or one output of 32 bits. So
a word belongs to other programs if the tile is another, and to other outputs if n is. Therefore
each word counts its own launches, and what `peers` says of a block holds for a word: a launch sends
word w for its nth time having heard w from all others for the (n - 1)th time. They sent that in a
launch that began, as far as anything of it can be seen, when all their launches before had ended:
also the one that read w for the (n - 2)th time. So its half is free, whatever tokens, n and tiles
have been in between.

No rank waits forever, though not all programs have room at once. Each one sends before it waits,
and a device starts a launch's programs in the order of their indices. Take the lowest index that
has not ended on some rank: there, all programs below have ended and made room, so this one has
started; on the others it has started or ended. It sends on all ranks, and so ends on all. Programs
of the next launch start when all of this one have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.peers import SymmetricBuffers, numbers, receive, send, word_of


class RanksOut(NamedTuple):
    """What outputs are added to, and how the others are reached, as an argument of a kernel."""

    #: [T · n / outputs a word] int32: the residual stream's memory.
    residual: torch.Tensor
    #: Of `SymmetricBuffers`, as the next two.
    addresses: torch.Tensor
    counts: torch.Tensor
    capacity: int

    @classmethod
    def of(cls, residual: torch.Tensor, buffers: SymmetricBuffers) -> RanksOut:
        """For a residual [T, n] of 16 or 32 bits that `fits`."""
        words = residual.view(torch.int32)
        return cls(words, buffers.addresses, buffers.counts, buffers.capacity)


def fits(residual: torch.Tensor, buffers: SymmetricBuffers, block_n: int) -> bool:
    """Whether programs of `block_n` outputs own whole words of [T, n], and buffers hold it."""
    in_word = 4 // residual.itemsize
    whole = block_n % in_word == 0 and residual.shape[1] % in_word == 0
    return whole and residual.is_contiguous() and buffers.fit(residual)


def copies(block_t: int, block_n: int, warps: int, dtype: torch.dtype) -> int:
    """How often a program must have its words, so that there are as many as threads.

    Only the first copy is sent and read; see `receive`.
    """
    return max(1, 32 * warps * (4 // dtype.itemsize) // (block_t * block_n))


@triton.jit
def number_launch(
    ranks,
    tokens,
    n,
    KIND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPIES: tl.constexpr,
):
    """The number of this launch for each of this program's words; inputs are there."""
    at, inside = _own_words(tokens, n, KIND, BLOCK_T, BLOCK_N, COPIES)
    return tl.load(ranks.counts + at, mask=inside, other=0) + 1


@triton.jit
def add_ranks(
    ranks,
    out,
    launch,
    tokens,
    n,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Residual [tokens, n] += all ranks' `out` [BLOCK_T, BLOCK_N] float32; launch as numbered."""
    at, inside = _own_words(tokens, n, KIND, BLOCK_T, BLOCK_N, COPIES)
    if KIND == "float32":
        even, odd = out, out
    else:
        even, odd = tl.split(tl.reshape(out, (BLOCK_T, BLOCK_N // 2, 2)))
    word = word_of(even, odd, KIND)[None, :, :]
    own = tl.reshape(tl.broadcast_to(word, (COPIES, word.shape[1], word.shape[2])), at.shape)
    half = (launch & 1) * WORLD * ranks.capacity
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            place = half + RANK * ranks.capacity + at
            send(own, ranks.addresses + rank, place, inside)
    low, high = numbers(tl.load(ranks.residual + at, mask=inside, other=0), KIND)
    sum_low = tl.zeros(at.shape, tl.float32)
    sum_high = tl.zeros(at.shape, tl.float32)
    for rank in tl.static_range(WORLD):
        word = own
        if rank != RANK:
            place = half + rank * ranks.capacity + at
            word = receive(ranks.addresses + RANK, place, inside)
        rank_low, rank_high = numbers(word, KIND)
        sum_low += rank_low
        sum_high += rank_high
    tl.store(ranks.residual + at, word_of(low + sum_low, high + sum_high, KIND), mask=inside)
    tl.store(ranks.counts + at, launch, mask=inside)


@triton.jit
def _own_words(
    tokens,
    n,
    KIND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Places of this program's words, COPIES times all tokens', and which of them to heed."""
    IN_WORD: tl.constexpr = 1 if KIND == "float32" else 2
    WORDS: tl.constexpr = BLOCK_N // IN_WORD
    i = tl.arange(0, COPIES * BLOCK_T * WORDS)
    token = i // WORDS  # further copies' tokens are beyond BLOCK_T
    word = tl.program_id(0) * WORDS + i % WORDS
    inside = (token < tokens) & (word < n // IN_WORD)
    return token * (n // IN_WORD) + word, inside
