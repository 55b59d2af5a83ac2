"""From the residual stream to queries and the pool: one kernel or three, against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenpod.kernels import reference
from tokenpod.kernels.ops import HeadNorm, KVScales, RowNorm
from tokenpod.kernels.triton import product, rotary
from tokenpod.kernels.triton.tiles import LIBRARY, Kind, Tile, Tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MULTIPLY_ADD = Tile(Kind.MULTIPLY_ADD, block_n=4, block_k=64, ahead=256)
MATRIX = Tile(Kind.MATRIX, block_n=16, block_k=32, warps=2, stages=3, ahead=256)
TILES = {"multiply_add": MULTIPLY_ADD, "matrix": MATRIX, "bulk": replace(MATRIX, bulk=True)}
SLOTS, HIDDEN = 150, 96


def only(tile):
    """A table that names one kernel for everything."""
    return Tiles({}, [(1 << 30, tile)])


@pytest.fixture(params=TILES)
def tile(request):
    return TILES[request.param]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh tensors hold NaN: what a kernel does not write shows."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, torch.nan, **how))


class Case:
    """One layer, and a step of `tokens` to strewn slots."""

    def __init__(self, draw, device, tokens, heads, head_dim, dtype, bias=False, hidden=HIDDEN):
        generator = torch.Generator().manual_seed(tokens)
        self.heads, self.kv_heads, self.head_dim = *heads, head_dim
        n = (heads[0] + 2 * heads[1]) * head_dim
        self.residual = draw(tokens, hidden, dtype=dtype).to(device) * 3
        self.weight = (draw(n, hidden) * hidden**-0.5).to(dtype).to(device)
        self.bias = draw(n, dtype=dtype).to(device) if bias else None
        self.norm = RowNorm(draw(hidden, dtype=dtype).to(device), 1e-5)
        self.slots = torch.randperm(SLOTS - 1, generator=generator)[:tokens].to(device)
        self.positions = torch.randint(131072, (tokens,), generator=generator).to(device)
        pairs = torch.arange(0, head_dim, 2)
        self.frequencies = (1 / 500000 ** (pairs / head_dim)).to(device)

    def run(self, prepare, rotate, *how, head_norm=None, scales=None, dtype=None):
        """Queries, keys and values; the pool was sevens before."""
        dtype = dtype or self.weight.dtype
        wide = lambda x: None if x is None else x.to(dtype)  # noqa: E731
        norm = RowNorm(wide(self.norm.weight), self.norm.epsilon)
        heads = prepare(wide(self.weight), wide(self.bias), norm, head_norm, *how)
        stored = dtype if scales is None else torch.float8_e4m3fn
        pool = torch.full((2, SLOTS, self.kv_heads, self.head_dim), 7.0, device=self.weight.device)
        keys, values = pool.to(stored)
        rotation = rotate(self.positions, self.frequencies, 1.1, dtype)
        q = heads(wide(self.residual), rotation, keys, values, self.slots, scales)
        assert q.shape == (len(self.slots), self.heads, self.head_dim)
        return q, keys, values

    def ours(self, tile, **how):
        return self.run(product.prepare_heads, rotary.rotate, only(tile), **how)

    def truth(self, **how):
        return self.run(
            reference.OPERATIONS.prepare_heads, reference.rotate, dtype=torch.float64, **how
        )


def agree(got, truth):
    for a, b in zip(got, truth, strict=True):
        error = ((a.double() - b.double()).norm() / b.double().norm()).item()
        assert error < 8 * torch.finfo(a.dtype).eps, error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_one_kernel_does_what_the_definition_says(tokens, bias, dtype, tile, draw, device):
    case = Case(draw, device, tokens, (6, 2), 16, dtype, bias)
    agree(case.ours(tile), case.truth())


@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (12, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64])
def test_every_shape_of_heads(heads, head_dim, tile, draw, device):
    case = Case(draw, device, 2, heads, head_dim, torch.float32)
    agree(case.ours(tile), case.truth())


@pytest.mark.parametrize("tokens", [17, rotary.MANY_TOKENS])
def test_more_tokens(tokens, tile, draw, device):
    case = Case(draw, device, tokens, (2, 1), 16, torch.bfloat16)
    agree(case.ours(tile), case.truth())


def test_the_result_is_bit_by_bit_that_of_three_kernels(tile, draw, device, monkeypatch):
    """So a token's key does not depend on how many tokens there were in its step."""
    case = Case(draw, device, 3, (4, 2), 32, torch.bfloat16)
    together = case.ours(tile)
    monkeypatch.setattr(product, "_owns_pairs", lambda tile, head_dim: False)
    for a, b in zip(together, case.ours(tile), strict=True):
        assert torch.equal(a, b)


def test_keys_and_values_of_8_bits(tile, draw, device, monkeypatch):
    case = Case(draw, device, 3, (6, 3), 16, torch.bfloat16)
    scales = KVScales(*torch.tensor([[0.01, 0.003, 2.0], [0.5, 0.0007, 1.0]], device=device))
    together = case.ours(tile, scales=scales)
    monkeypatch.setattr(product, "_owns_pairs", lambda tile, head_dim: False)
    for a, b in zip(together, case.ours(tile, scales=scales), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert together[2].float().abs().max() == rotary.LARGEST


@pytest.mark.parametrize(
    ("tile", "head_dim", "normed", "kernels"),
    [
        (MULTIPLY_ADD, 16, False, 1),
        (MATRIX, 16, False, 1),
        (replace(MATRIX, splits=2), 16, False, 1),
        (MATRIX, 24, False, 2),
        (MATRIX, 16, True, 2),
        (LIBRARY, 16, False, 2),
    ],
    ids=["few", "matrix", "never in shares", "no whole heads", "normed heads", "library"],
)
def test_heads_are_stored_apart_where_a_program_does_not_own_them(
    tile, head_dim, normed, kernels, draw, device, monkeypatch
):
    case = Case(draw, device, 3, (4, 2), head_dim, torch.float32)
    weights = draw(2, head_dim).to(device)
    calls, store = [], product.store_key_value
    monkeypatch.setattr(product, "store_key_value", lambda *args: calls.append(1) or store(*args))
    norm = HeadNorm(weights[0], weights[1], 1e-6) if normed else None
    got = case.ours(tile, head_norm=norm)
    assert len(calls) == kernels - 1
    wide = HeadNorm(weights[0].double(), weights[1].double(), 1e-6) if normed else None
    agree(got, case.truth(head_norm=wide))


def test_not_a_number_stays_in_its_token(tile, draw, device):
    case = Case(draw, device, 3, (4, 2), 16, torch.float32)
    clean = case.ours(tile)
    case.residual[1] = torch.nan
    q, keys, _ = case.ours(tile)
    assert q[1].isnan().all()
    assert keys[case.slots[1]].isnan().all()
    others = [0, 2]
    assert torch.equal(q[others], clean[0][others])
    assert torch.equal(keys[case.slots[others]], clean[1][case.slots[others]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (16, 16)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("tokens", [1, 2, 16, 63, 64])
def test_models_shapes(tokens, head_dim, heads, dtype, draw, device):
    """With the tiles that a model gets."""
    case = Case(draw, device, tokens, heads, head_dim, dtype, True, hidden=4096)
    agree(case.run(product.prepare_heads, rotary.rotate), case.truth())
