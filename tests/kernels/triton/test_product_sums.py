"""Products that add the ranks' partial sums, against products and `SymmetricBuffers.add`.

As in `test_peers`, messages are put into a rank's buffer before it waits for them; only the last
test has ranks that really wait for each other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.interpreted import DEVICE
from support.kernels.summing_ranks import (
    LONG,
    MATRIX,
    MULTIPLY_ADD,
    K,
    Sum,
    follow_turns,
    long_partial,
    turn_of,
)
from support.steps.rank_processes import run_ranks
from tokenpod.kernels.backends.triton import OPERATIONS
from tokenpod.kernels.gpu.peers import BLOCK, EMPTY, EMPTY_PAIR, SymmetricBuffers
from tokenpod.kernels.operations.parallel import parallel
from tokenpod.kernels.products import triton_product as product
from tokenpod.kernels.products.product_sums import copies, fits
from tokenpod.kernels.products.product_tiles import LIBRARY, Tile, Tiles

BF16 = torch.bfloat16
TILES = {"multiply_add": MULTIPLY_ADD, "matrix": MATRIX}
#: No multiple of what a program has.
N = 90


class Ranks:
    """All ranks' buffers, for products and for sums behind them."""

    def __init__(self, world: int, capacity: int = 4 * BLOCK) -> None:
        self.world = world
        #: [for sums behind products or at their ends, receiver, half, sender, word]
        shape = 2, world, 2, world, capacity
        self.memory = torch.full(shape, EMPTY.value, dtype=torch.int32, device=DEVICE)
        addresses = [[buffer.data_ptr() for buffer in buffers] for buffers in self.memory]
        ranks = range(world)
        self.behind = [SymmetricBuffers.at(addresses[0], rank, capacity, DEVICE) for rank in ranks]
        self.buffers = [
            SymmetricBuffers.at(addresses[1], rank, capacity, DEVICE, together=1) for rank in ranks
        ]

    def put(self, kind: int, sender: int, receiver: int, message: torch.Tensor) -> None:
        """What `sender` is about to write, if it has launched as often as `receiver`."""
        words = message.reshape(-1).view(torch.int32)
        buffers = (self.behind, self.buffers)[kind][receiver]
        at = torch.arange(len(words), device=DEVICE)
        launch = buffers.counts[at if kind == 1 else at // BLOCK].to(torch.int64) + 1
        self.memory[kind, receiver, launch % 2, sender, at] = words

    def apart(
        self, rank: int, partials: list[torch.Tensor], residual: torch.Tensor
    ) -> torch.Tensor:
        for sender in set(range(self.world)) - {rank}:
            self.put(0, sender, rank, partials[sender])
        total = residual.clone()
        self.behind[rank].add(partials[rank].clone(), total)
        return total

    def at_the_end(
        self, rank: int, each: Sum, partials: list[torch.Tensor], tile: Tile
    ) -> torch.Tensor:
        for sender in set(range(self.world)) - {rank}:
            self.put(1, sender, rank, partials[sender])
        total = each.residual.clone()
        x, weight, bias = each.inputs[rank], each.weights[rank], each.biases[rank]
        product.multiply(x, weight, bias, total, tile, buffers=self.buffers[rank])
        return total


def assert_same(ranks: Ranks, each: Sum, tile: Tile, on: list[int]) -> None:
    partials = [each.partial(rank, tile) for rank in range(ranks.world)]
    for rank in on:
        expected = ranks.apart(rank, partials, each.residual)
        assert not torch.equal(expected, each.residual)
        assert torch.equal(ranks.at_the_end(rank, each, partials, tile), expected)


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.gpu)])
def test_the_sum_is_that_of_products_and_sums_apart(world, tokens, tile):
    each = Sum.draw(world, tokens, N, bias=tokens != 3)
    assert_same(Ranks(world), each, tile, on=[0, world - 1])


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_numbers_of_other_types_are_summed_too(dtype, tile):
    assert_same(Ranks(2), Sum.draw(2, 3, N, dtype=dtype, bias=True), tile, on=[0, 1])


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_the_others_get_each_output_once(tile):
    ranks, each = Ranks(3), Sum.draw(3, 2, N)
    partials = [each.partial(rank, tile) for rank in range(3)]
    ranks.at_the_end(1, each, partials, tile)
    for receiver in (0, 2):
        words = ranks.memory[1, receiver, 1, 1]
        assert torch.equal(words[:N].view(BF16).view(2, N), partials[1])
        assert (words[N:] == EMPTY.value).all()
        assert (ranks.memory[1, receiver, 0] == EMPTY.value).all()
    assert (ranks.memory[0] == EMPTY.value).all()
    assert (ranks.memory[1, 1] == EMPTY.value).all()


def test_any_tokens_outputs_and_tiles_follow_each_other():
    """A word belongs to other programs then, and to other outputs; it counts for itself."""
    ranks = Ranks(2)
    wider = replace(MULTIPLY_ADD, block_n=16)
    launches = torch.zeros_like(ranks.buffers[0].counts)
    steps = [
        *[(1, N, MULTIPLY_ADD)] * 2,
        (17, N, MATRIX),
        (3, 34, wider),
        (1, N, wider),
        (2, 130, MATRIX),
        (3, N, MULTIPLY_ADD),
        (1, N, MATRIX),
        *[(1, N, MULTIPLY_ADD)] * 2,
    ]
    for seed, (tokens, n, tile) in enumerate(steps):
        assert_same(ranks, Sum.draw(2, tokens, n, seed=seed), tile, on=[0])
        launches[: tokens * n // 2] += 1
    assert torch.equal(ranks.buffers[0].counts, launches)
    assert launches.unique().numel() > 3


def test_bad_numbers_stay_bad():
    each = Sum.draw(2, 1, N)
    each.weights[0][5, 0] = float("nan")
    each.weights[1][8, 0] = float("inf")
    partials = [each.partial(rank, MULTIPLY_ADD) for rank in range(2)]
    total = Ranks(2).at_the_end(0, each, partials, MULTIPLY_ADD)[0]
    assert total[5].isnan()
    assert total[8].isinf()
    assert total.isfinite().sum() == N - 2


def test_a_program_has_as_many_words_as_threads_or_more():
    for block_t, block_n, warps, dtype in ((1, 4, 4, BF16), (4, 2, 4, BF16), (16, 64, 2, BF16)):
        words = copies(block_t, block_n, warps, dtype) * block_t * block_n // 2
        assert words >= 32 * warps
    assert copies(1, 4, 4, torch.float32) == 32
    assert copies(16, 64, 2, BF16) == 1


def test_what_does_not_fit_is_known_before():
    buffers = Ranks(2, capacity=BLOCK).buffers[0]
    wide = torch.zeros(2, BLOCK, dtype=BF16, device=DEVICE)
    assert fits(wide, buffers, 4)
    assert not fits(torch.zeros(3, BLOCK, dtype=BF16, device=DEVICE), buffers, 4)
    assert not fits(wide, buffers, 1)
    assert fits(wide.float()[:, : BLOCK // 2].contiguous(), buffers, 1)
    assert not fits(wide[:, :7].contiguous(), buffers, 4)
    assert not fits(wide[:, ::2], buffers, 4)


# -- what a model calls ------------------------------------------------------------------------


class Alone:
    """A group whose other rank has sent zeros."""

    rank, world, local_ranks = 0, 2, 2

    def __init__(self, buffers: SymmetricBuffers | None) -> None:
        self.buffers = buffers
        self.added: list[int] = []

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        self.added.append(len(residual))
        residual += partial.view(-1, *residual.shape).sum(0).to(residual.dtype)


@pytest.mark.parametrize(
    ("tiles", "tokens", "apart"),
    [
        (Tiles({}, [(4, MULTIPLY_ADD)]), 1, False),
        (Tiles({(N, K): [(4, LIBRARY)]}, [(4, MULTIPLY_ADD)]), 1, False),
        (Tiles({}, [(4, MULTIPLY_ADD)]), 5, True),
        (Tiles({}, [(4, replace(MATRIX, splits=2))]), 4, True),
        (Tiles({}, [(99, MATRIX)]), 99, True),
    ],
    ids=["own", "own instead of the library's", "library", "splits", "too long"],
)
def test_a_product_and_its_sum_are_apart_where_they_cannot_be_one(tiles, tokens, apart):
    ranks, each = Ranks(2), Sum.draw(2, tokens, N)
    ranks.put(1, 1, 0, torch.zeros(min(tokens, 4), N, dtype=BF16, device=DEVICE))
    group = Alone(ranks.buffers[0])

    def prepare(weight, bias, buffers, otherwise):
        return product.prepare_sum_linear(weight, bias, buffers, otherwise, tiles)

    ops = replace(
        OPERATIONS,
        prepare_linear=lambda weight, bias: product.prepare_linear(weight, bias, tiles),
        prepare_sum_linear=prepare,
    )
    total = each.residual.clone()
    parallel(ops, group).prepare_add_linear(each.weights[0], None)(each.inputs[0], total)
    assert group.added == [tokens] * apart
    assert bool(ranks.buffers[0].counts.any()) == (not apart)
    expected = each.residual.float() + each.inputs[0].float() @ each.weights[0].float().T
    torch.testing.assert_close(total.float(), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("lacks", ["buffers", "operation"])
def test_without_buffers_or_a_way_to_use_them_the_group_adds(lacks):
    each = Sum.draw(2, 1, N)
    buffers = None if lacks == "buffers" else Ranks(2).buffers[0]
    prepare = None if lacks == "operation" else OPERATIONS.prepare_sum_linear
    group = Alone(buffers)
    ops = replace(OPERATIONS, prepare_sum_linear=prepare)
    parallel(ops, group).prepare_add_linear(each.weights[0], None)(each.inputs[0], each.residual)
    assert group.added == [1]


# -- ranks that wait for each other ------------------------------------------------------------


@pytest.mark.skipif(DEVICE.type == "cuda", reason="processes share the host's memory")
@pytest.mark.pod
def test_ranks_that_run_at_once_never_overtake_each_other():
    world = 2
    memory = torch.full((2, world, 2, world, BLOCK), EMPTY.value, dtype=torch.int32).share_memory_()
    words = SymmetricBuffers.words(world, LONG)
    others = torch.full((world, words), EMPTY_PAIR, dtype=torch.int64).share_memory_()
    jobs = [(rank, world, memory, others) for rank in range(world)]
    first, second = run_ranks(follow_turns, jobs)
    assert len(first) > 40
    for got, on_the_other in zip(first, second, strict=True):
        assert (got == on_the_other).all()
    for turn, (got, long) in enumerate(zip(first[::2], first[1::2], strict=True)):
        assert (long == (long_partial(turn, 0) + long_partial(turn, 1)).numpy()).all()
        each = turn_of(turn, world)[2]
        expected = each.residual.float()
        for x, weight in zip(each.inputs, each.weights, strict=True):
            expected = expected + x.float() @ weight.float().T
        torch.testing.assert_close(torch.from_numpy(got).float(), expected, rtol=0.01, atol=0.1)
