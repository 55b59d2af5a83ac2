"""Adapters' terms, summed where a product of few tokens ends: without a launch of their own.

What inputs times the first factors are (`inner`) was made by a launch before. The second factors
are columns behind the weight's: a token's are those of its adapter, all others are zero for it. For
a handful of tokens each program reads those of every token; on the matrix unit it walks the units
of a step, 16 ranks of a tile's adapter each, and tokens of other tiles have zeros there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

#: Ranks of a unit: the least that a matrix unit takes.
RANKS = 16
_RANKS = tl.constexpr(RANKS)


class Terms(NamedTuple):
    """What is read of adapters, as an argument of a kernel; see `adapters.Plan`."""

    #: [splits, T, parts, width] float32
    inner: torch.Tensor
    #: See `AdapterWeights`, as the next; without a bias it is `up`.
    up: torch.Tensor
    bias: torch.Tensor
    t_adapter: torch.Tensor
    t_tile: torch.Tensor
    units: torch.Tensor
    count: torch.Tensor
    ranks: torch.Tensor
    slot_stride: int
    rank_stride: int
    bias_stride: int
    #: Outputs of the first part, and of the first two.
    rows_0: int
    rows_1: int


@triton.jit
def part_of(terms, row):
    """Which part outputs from `row` on are of; a program's are of one."""
    return (row >= terms.rows_0).to(tl.int32) + (row >= terms.rows_1).to(tl.int32)


@triton.jit
def second_factors(terms, row, inside, tokens, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr):
    """[BLOCK_T, rows, WIDTH]: each token's; these are weights and the step's integers alone."""
    token = tl.arange(0, BLOCK_T)
    slot = tl.load(terms.t_adapter + token, mask=token < tokens, other=0)
    own = tl.load(terms.ranks + slot - 1, mask=slot > 0, other=0)
    rank = tl.arange(0, WIDTH)
    at = terms.up + (slot - 1).to(tl.int64)[:, None, None] * terms.slot_stride
    at += rank[None, None, :] * terms.rank_stride + row[None, :, None]
    mask = (rank[None, None, :] < own[:, None, None]) & inside[None, :, None]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def token_terms(
    terms,
    factors,
    part,
    tokens,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[BLOCK_T, rows] float32: inner times the second factors; inner is there."""
    token = tl.arange(0, BLOCK_T)
    slot = tl.load(terms.t_adapter + token, mask=token < tokens, other=0)
    own = tl.load(terms.ranks + slot - 1, mask=slot > 0, other=0)
    rank = tl.arange(0, WIDTH)
    mask = rank[None, :] < own[:, None]
    inner = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    for split in tl.static_range(SPLITS):
        at = ((split * tokens + token) * PARTS + part) * WIDTH
        inner += tl.load(terms.inner + at[:, None] + rank[None, :], mask=mask, other=0.0)
    return tl.sum(factors.to(tl.float32) * inner[:, None, :], axis=2)


@triton.jit
def token_biases(terms, row, inside, tokens, BLOCK_T: tl.constexpr):
    """[BLOCK_T, rows] float32: what adapters add to each token whatever it is."""
    token = tl.arange(0, BLOCK_T)
    slot = tl.load(terms.t_adapter + token, mask=token < tokens, other=0)
    at = terms.bias + (slot - 1).to(tl.int64)[:, None] * terms.bias_stride + row[None, :]
    mask = (slot[:, None] > 0) & inside[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def add_units(
    sums,
    terms,
    part,
    row,
    inside,
    tokens,
    first,
    step,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums [rows, BLOCK_T] and every `step`-th block of COLUMNS columns of adapters."""
    token = tl.arange(0, BLOCK_T)
    t_tile = tl.load(terms.t_tile + token, mask=token < tokens, other=-1)
    columns = tl.load(terms.count) * _RANKS
    for start in tl.range(first * COLUMNS, columns, step * COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        unit = terms.units + column // _RANKS * 4
        there = column < columns
        tile = tl.load(unit, mask=there, other=-2)
        slot = tl.load(unit + 1, mask=there, other=1)
        block = tl.load(unit + 2, mask=there, other=0)
        length = tl.load(unit + 3, mask=there, other=0)
        rank = block * _RANKS + column % _RANKS
        valid = column % _RANKS < length
        at = terms.up + (slot - 1).to(tl.int64) * terms.slot_stride + rank * terms.rank_stride
        factors = tl.load(
            at[None, :] + row[:, None], mask=valid[None, :] & inside[:, None], other=0.0
        )
        mask = (tile[:, None] == t_tile[None, :]) & valid[:, None]
        inner = tl.zeros((COLUMNS, BLOCK_T), tl.float32)
        for split in tl.static_range(SPLITS):
            seen = ((split * tokens + token) * PARTS + part) * WIDTH
            inner += tl.load(terms.inner + seen[None, :] + rank[:, None], mask=mask, other=0.0)
        sums = tl.dot(factors, inner.to(factors.dtype), sums, input_precision="ieee")
    return sums
