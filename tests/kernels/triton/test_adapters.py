"""Adapters by the GPU's kernels: what the reference adds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.interpreted import DEVICE
from tokenpod.kernels.adapters import (
    adapted,
    adapter_embeddings,
    adapter_heads,
)
from tokenpod.kernels.adapters import reference_adapters as reference
from tokenpod.kernels.adapters import (
    triton_adapters as adapters,
)
from tokenpod.kernels.adapters.triton_adapters import AdapterTiles, adapt, plan_adapters
from tokenpod.kernels.backends import reference as plain
from tokenpod.kernels.operations.adapter_ops import AdapterWeights, Added, DenseWeight
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.products.product_tiles import LIBRARY, Kind, Tile
from tokenpod.kernels.products.product_tiles import Tiles as ProductTiles
from tokenpod.kernels.products.triton_product import prepare_linear

SLOTS = 3
SMALL, LARGE = AdapterTiles(4, 32, 2, 4, 32, 4), AdapterTiles(32, 16, 1, 4, 16, 4)


def weights_of(rows, inputs, rank, dtype, *, bias=False, seed=0):
    """Slots as the store has them: a rank's numbers of all products beside each other.

    Two of them scale outputs; the third has numbers that an adapter before it has left.
    """
    generator = torch.Generator().manual_seed(seed)
    parts, outputs = len(rows), sum(rows)
    numbers = parts * inputs + outputs + 16
    slots = torch.randn(SLOTS, rank + 1, numbers, generator=generator).to(DEVICE, dtype)
    down = slots[:, 1:, : parts * inputs].view(SLOTS, rank, parts, inputs).transpose(1, 2)
    return AdapterWeights(
        down=down,
        up=slots[:, 1:, parts * inputs : parts * inputs + outputs],
        bias=slots[:, 0, parts * inputs : parts * inputs + outputs] if bias else None,
        rows=rows,
        scale=(torch.rand(SLOTS, outputs + 3, generator=generator) + 0.5).to(DEVICE)[:, :outputs],
        scaled=torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE),
    )


CASES = {
    "one token": ([2], (24,), 40, 16, SMALL, False),
    "one token without": ([0], (24,), 40, 16, SMALL, False),
    "three parts": ([1, 0, 3, 3, 2, 1], (40, 24, 24), 72, 8, SMALL, False),
    "two parts, wide": ([2] * 40 + [0] * 3 + [1] * 30, (24, 24), 48, 24, LARGE, False),
    "biases": ([1, 2, 0, 2], (24,), 40, 16, SMALL, True),
    "many ranks": ([3, 1, 3], (24,), 40, 80, SMALL, False),
    "most ranks": ([3, 1], (24,), 40, 256, SMALL, False),
}


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_row", [False, True])
def test_it_makes_what_the_reference_makes(case, dtype, by_row):
    adapters, rows, inputs, rank, cut, bias = CASES[case]
    weights = weights_of(rows, inputs, rank, dtype, bias=bias)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(adapters), inputs, generator=generator).to(DEVICE, dtype)
    y = torch.randn(len(adapters), sum(rows), generator=generator).to(DEVICE, dtype)
    # One slot has all ranks; others fewer, and what lies beyond is an older adapter's.
    numbers = [rank, max(rank // 3, 1), rank - 1]
    ranks = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    t_adapter = torch.tensor(adapters, device=DEVICE)
    expected, found = y.clone(), y.clone()
    reference.adapt(x, expected, weights, reference.plan_adapters(t_adapter, ranks))
    adapt(x, found, weights, plan_adapters(t_adapter, ranks, cut._replace(by_row=by_row)))
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.5}
    torch.testing.assert_close(found, expected, **close)
    assert torch.equal(found[t_adapter == 0], y[t_adapter == 0])


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_have_programs_of_more_outputs(dtype, monkeypatch):
    """A slot of rank 0 leaves the base's product as it is, and one of more ranks adds them."""
    monkeypatch.setattr(adapters, "WIDE", 600)
    weights = replace(weights_of((600,), 40, 24, dtype), scale=None)
    slots, ranks = [0, 1, 2, 3, 1, 1], torch.tensor([24, 0, 5], dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(len(slots), 40, generator=generator).to(DEVICE, dtype)
    y = torch.randn(len(slots), 600, generator=generator).to(DEVICE, dtype)
    t_adapter = torch.tensor(slots, device=DEVICE)
    expected, found = y.clone(), y.clone()
    reference.adapt(x, expected, weights, reference.plan_adapters(t_adapter, ranks))
    cut = SMALL._replace(by_row=True)
    adapt(x, found, weights, plan_adapters(t_adapter, ranks, cut=cut))
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.5}
    torch.testing.assert_close(found, expected, **close)
    kept = (t_adapter == 0) | (t_adapter == 2)
    assert torch.equal(found[kept], y[kept])


def test_what_a_plan_says_follows_from_its_tensors_alone():
    """A captured step reads both again: its launches are the same for any adapters."""
    weights = weights_of((24,), 40, 16, torch.float32)
    x = torch.randn(6, 40, device=DEVICE)
    ranks = torch.tensor([16, 16, 16], device=DEVICE)
    shapes = set()
    for slots in ([0] * 6, [1, 2, 3, 1, 2, 3], [2] * 6):
        plan = plan_adapters(torch.tensor(slots, device=DEVICE), ranks, SMALL)
        assert plan.tiles[:, 2].sum() == 6
        shapes.add((plan.order.shape, plan.tiles.shape))
        adapt(x, torch.zeros(6, 24, device=DEVICE), weights, plan)
    assert len(shapes) == 1


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 100])
def test_each_token_is_in_one_tile_of_its_adapter(tokens):
    generator = torch.Generator().manual_seed(2)
    t_adapter = torch.randint(0, SLOTS + 1, (tokens,), generator=generator).to(DEVICE)
    ranks = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    plan = plan_adapters(t_adapter, ranks, SMALL)
    seen = []
    for slot, first, length, rank in plan.tiles.tolist():
        own = plan.order[first : first + length].tolist()
        # Those of a slot without ranks are as those without an adapter.
        assert all(t_adapter[token] == (slot if rank else t_adapter[own[0]]) for token in own)
        assert all(rank or t_adapter[token] in (0, 2) for token in own)
        assert bool(slot) == bool(rank)
        seen += own
    assert sorted(seen) == list(range(tokens))


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_few_tokens_are_planned_as_many_are(tokens, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    t_adapter = torch.randint(0, SLOTS + 1, (tokens,), generator=generator).to(DEVICE)
    ranks = torch.tensor([20, 0, 16], dtype=torch.int32, device=DEVICE)
    found = plan_adapters(t_adapter, ranks, SMALL)
    monkeypatch.setattr(adapters, "MOST_PLANNED", 0)
    expected = plan_adapters(t_adapter, ranks, SMALL)
    assert torch.equal(found.order, expected.order)
    used = expected.tiles[:, 2] > 0
    assert torch.equal(found.tiles[found.tiles[:, 2] > 0], expected.tiles[used])
    assert not found.tiles[len(used[used]) :, 2:].any()


FEW = Tile(Kind.MULTIPLY_ADD, block_n=8, block_k=32)
ON_MATRIX = Tile(Kind.MATRIX, block_n=16, block_k=32)
PRODUCTS = {
    "one token": ([2], FEW),
    "one token without": ([0], FEW),
    "the matrix unit": ([2, 0, 1, 3, 3, 1, 0], ON_MATRIX),
    "splits": ([1, 0, 2], Tile(Kind.MATRIX, block_n=16, block_k=32, splits=2)),
    "the library": ([1, 0, 2], LIBRARY),
}


@pytest.mark.sampled(7, "gpu")
@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_row", [False, True])
def test_products_end_in_what_adapters_make_of_them(case, dtype, by_row):
    """Plain, normed and gated, and into the stream; with adapters' biases and without."""
    t_adapter, tile = PRODUCTS[case]
    tiles = ProductTiles({}, [(64, tile)])
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return (torch.randn(shape, generator=generator).to(dtype) * 0.3).to(DEVICE)

    rows, inputs, rank = (48, 16, 16), 64, 24
    x, stream = draw(len(t_adapter), inputs), draw(len(t_adapter), 80)
    weight, bias, norm = draw(80, inputs), draw(80), RowNorm(draw(inputs), 1e-5)
    ranks = torch.tensor([rank, 5, 17], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor(t_adapter, device=DEVICE)
    cut = AdapterTiles(16, 32, 2, 4, 16, 4, by_row=by_row)
    plan = plan_adapters(slots, ranks, cut)
    seen = plain.plan_adapters(slots, ranks)
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.3}

    def added(rows, *, bias=False):
        weights = weights_of(rows, inputs, rank, dtype, bias=bias)
        for each in (weights.down, weights.up):
            each *= 0.3
        return Added(weights, plan, adapt), Added(weights, seen, plain.adapt)

    def plainly(read, own, bias):
        y = plain.OPERATIONS.prepare_linear(weight, bias)(read)
        own.apply(read, y)
        return y

    for biases in (False, True):
        base, dense = prepare_linear(weight, bias, tiles), DenseWeight(weight, bias)
        # A weight that is at hand makes a difference for one token.
        for given in (dense, None)[: 2 if len(x) == 1 else 1]:
            own, other = added(rows, bias=biases)
            found = adapted.linear(base, given, tiles=tiles)(x, own)
            torch.testing.assert_close(found, plainly(x, other, bias), **close)
            own, other = added((80,), bias=biases)
            found = stream.clone()
            adapted.add_linear(base, given, tiles)(x, found, own)
            expected = stream + plainly(x, other, bias)
            torch.testing.assert_close(found, expected, **close)
            normed = plain.OPERATIONS.rms_norm(x, norm.weight, norm.epsilon)
            for activation, parts in ((Activation.SILU, (40, 40)), (None, rows)):
                own, other = added(parts, bias=biases)
                found = adapted.linear(base, given, norm, activation, tiles)(x, own)
                expected = plainly(normed, other, bias)
                if activation is not None:
                    expected = plain.OPERATIONS.act_mul(expected, activation)
                torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_products_with_a_weight_of_their_adapter_are_those_of_the_reference(tokens):
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(SLOTS, 100, 40, generator=generator).to(DEVICE)
    x = torch.randn(tokens, 40, generator=generator).to(DEVICE)
    t_adapter = torch.arange(tokens, device=DEVICE) % 5
    has = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    own = (t_adapter == 1) | (t_adapter == 3)  # slot 2 has none, and there is no fourth
    found = adapter_heads.own_linear(x, weights, t_adapter, has)[own]
    expected = reference.own_linear(x, weights, t_adapter, has)[own]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for at, row in zip(own.nonzero().flatten().tolist(), expected, strict=True):
        torch.testing.assert_close(row, weights[t_adapter[at] - 1] @ x[at])


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 8), (9, 16), (70, 40)])
def test_rows_of_a_table_get_what_the_reference_adds(tokens, rank, dtype):
    """Of three slots one has all ranks and one none; some tokens are of other ranks' words."""
    rows, width = 30, 600
    weights = weights_of((width,), rows, rank, dtype)
    generator = torch.Generator().manual_seed(6)
    t_row = torch.randint(-rows, 2 * rows, (tokens,), generator=generator).to(DEVICE)
    t_adapter = (torch.arange(tokens, device=DEVICE) + 1) % (SLOTS + 1)
    ranks = torch.tensor([rank, 0, rank - 3], dtype=torch.int32, device=DEVICE)
    x = torch.randn(tokens, width, generator=generator).to(DEVICE, dtype)
    t_row[0] = 3
    found, expected = x.clone(), x.clone()
    adapter_embeddings.adapt_rows(found, weights, t_row, t_adapter, ranks)
    reference.adapt_rows(expected, weights, t_row, t_adapter, ranks)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(found, expected, **close)
    changed = (found != x).any(1)
    has = (t_adapter == 1) | (t_adapter == 3)
    assert torch.equal(changed, has & (t_row >= 0) & (t_row < rows))
