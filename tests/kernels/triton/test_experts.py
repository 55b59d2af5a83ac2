"""Mixtures of experts by our kernels: against float64, for all kinds of routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from support.kernels.interpreted import INTERPRETED
from tokenpod.kernels.experts import expert_routing
from tokenpod.kernels.experts import triton_experts as experts
from tokenpod.kernels.experts.expert_products import most_blocks
from tokenpod.kernels.experts.expert_routing import assign
from tokenpod.kernels.experts.expert_tiles import ANY, ProductTile, Tile, choose_tile, table_for
from tokenpod.kernels.experts.reference_experts import choose, mixture
from tokenpod.kernels.operations.expert_ops import ExpertWeights, Routing, Score, Shared
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise import triton_pointwise as pointwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = ((ANY, Tile(16, ProductTile(32, 32, 4, 2), ProductTile(16, 32, 4, 2))),)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def case(draw, device):
    """A residual stream, experts and a norm; results are near one."""

    def make(tokens, count=5, hidden=40, width=24, dtype=torch.float32):
        weights = ExpertWeights(
            router=draw(count, hidden),
            gate_up=draw(count, 2 * width, hidden) * hidden**-0.5,
            down=draw(count, hidden, width) * width**-0.5,
        )
        weights = ExpertWeights(*(weight.to(dtype).to(device) for weight in weights[:3]))
        norm = RowNorm(draw(hidden, dtype=dtype).abs().to(device), 1e-6)
        return draw(tokens, hidden, dtype=dtype).to(device), weights, norm

    return make


def block(weights, norm, routing, activation=Activation.SILU, tiles=SMALL):
    return experts.prepare_experts(weights, norm, activation, routing, tiles)


def truth_of(residual, weights, norm, routing, activation=Activation.SILU):
    """The residual stream after the block, in float64 but for the norm: rounding may not choose."""
    wide = ExpertWeights(*(weight if weight is None else weight.double() for weight in weights))
    normed = residual if norm is None else pointwise.rms_norm(residual, *norm)
    return residual.double() + mixture(normed.double(), wide, activation, routing)


def agree(got, truth):
    error = ((got.double() - truth).norm() / truth.norm()).item()
    assert error < 8 * torch.finfo(got.dtype).eps, error


def check(residual, weights, norm, routing, activation=Activation.SILU, tiles=SMALL):
    truth = truth_of(residual, weights, norm, routing, activation)
    assert block(weights, norm, routing, activation, tiles)(residual) is None
    agree(residual, truth)


@pytest.mark.sampled(7, "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", [Routing(1, False), Routing(2, True), Routing(5, False)])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_a_block(tokens, routing, dtype, case):
    check(*case(tokens, dtype=dtype), routing)


ROUTERS = {
    "sigmoid": Routing(2, True, Score.SIGMOID, scale=2.5),
    "one-of-three-groups": Routing(2, False, groups=3, chosen_groups=1),
    "two-of-three-groups": Routing(
        3, True, Score.SIGMOID, groups=3, chosen_groups=2, group_best=2, least_sum=1e-20
    ),
    "sparsemixer": Routing(2, False, Score.SPARSEMIXER, tolerance=0.6),
    "least-sum": Routing(2, True, least_sum=1.5),
}


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("routing", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("normed", [False, True])
def test_every_kind_of_router(normed, tokens, routing, case, draw, device):
    """With all biases, and what is normed already."""
    residual, weights, norm = case(tokens, count=6)
    weights = weights._replace(
        router_bias=draw(6).to(device),
        correction=None if routing.score is Score.SPARSEMIXER else draw(6).to(device),
        gate_up_bias=draw(*weights.gate_up.shape[:2]).to(device),
        down_bias=draw(*weights.down.shape[:2]).to(device),
    )
    check(residual, weights, norm if normed else None, routing, Activation.SWIGLU_CLAMPED)


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("count", [1, 8, 33])
@pytest.mark.parametrize("tokens", [1, 5])
def test_any_number_of_experts(tokens, count, case):
    check(*case(tokens, count=count), Routing(min(count, 3), True))


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize(
    "shape",
    [(16, 16), (33, 7), (100, 130), pytest.param((512, 48), marks=pytest.mark.gpu)],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_any_shape_of_experts(tokens, shape, case):
    check(*case(tokens, hidden=shape[0], width=shape[1]), Routing(2, True))


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("tokens", [1, 4])
def test_gates(tokens, activation, case):
    check(*case(tokens), Routing(2, True), activation)


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_without_gates_that_read_another_input(tokens, dtype, case, draw, device):
    """As Nemotron 3's: the router alone reads the stream, here of 40 numbers and not of 24."""
    residual, weights, _ = case(tokens, hidden=24, dtype=dtype)
    weights = weights._replace(
        gate_up=weights.gate_up[:, :24].contiguous(),
        router=draw(5, 40, dtype=dtype).to(device),
        gate_up_bias=draw(5, 24, dtype=dtype).to(device),
    )
    assert not weights.gated
    seen = draw(tokens, 40, dtype=dtype).to(device)
    routing, activation = Routing(2, True, Score.SIGMOID), Activation.RELU_SQUARED
    truth = residual.double() + mixture(
        seen.double(),
        ExpertWeights(*(x if x is None else x.double() for x in weights)),
        activation,
        routing,
        residual,
    )
    block(weights, None, routing, activation)(seen, residual, None, residual.clone())
    agree(residual, truth)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 20])
def test_what_is_shared_is_rounded_with_the_sum(tokens, gated, case, draw, device):
    residual, weights, norm = case(tokens, dtype=torch.bfloat16)
    shared = Shared(
        draw(*residual.shape, dtype=torch.bfloat16).to(device),
        draw(tokens, 1, dtype=torch.bfloat16).to(device) if gated else None,
    )
    truth = truth_of(residual, weights, norm, Routing(2, True)) + shared.gated().double()
    block(weights, norm, Routing(2, True))(residual, None, shared)
    agree(residual, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_measured_tiles(dtype, case):
    check(*case(5, dtype=dtype), Routing(2, True), tiles=None)


def test_more_tokens_than_one_program_chooses_for(case):
    check(*case(66, hidden=16, width=16), Routing(1, True))


def towards(weights, expert):
    """The same experts with a router that sends all there: inputs are positive."""
    router = torch.full_like(weights.router, -1)
    router[expert] = 1
    return weights._replace(router=router)


@pytest.mark.parametrize("tokens", [1, 40])
def test_all_tokens_choose_one_expert(tokens, case):
    residual, weights, norm = case(tokens)
    check(residual.abs(), towards(weights, 3), norm, Routing(1, True))


@pytest.mark.parametrize("tokens", [1, 20])
def test_an_expert_whom_nobody_chose_is_not_read(tokens, case):
    residual, weights, norm = case(tokens)
    residual, weights = residual.abs(), towards(weights, 3)
    expected = residual.clone()
    block(weights, norm, Routing(1, True))(expected)
    for weight in (weights.gate_up, weights.down):
        weight[:3], weight[4:] = torch.nan, torch.nan
    block(weights, norm, Routing(1, True))(residual)
    assert torch.equal(residual, expected)


def test_a_token_that_holds_nan_spoils_no_other(case):
    residual, weights, norm = case(9)
    run = block(weights, norm, Routing(2, True))
    expected = residual.clone()
    run(expected)
    residual[4, 7] = torch.nan
    run(residual)
    assert residual[4].isnan().all()
    assert torch.equal(residual[torch.arange(9) != 4], expected[torch.arange(9) != 4])


def test_a_single_token_that_holds_nan_gets_nan(case):
    residual, weights, norm = case(1)
    residual[0, 7] = torch.nan
    block(weights, norm, Routing(2, True))(residual)
    assert residual.isnan().all()


def test_the_same_input_gives_the_same_bits(case):
    residual, weights, norm = case(18, dtype=torch.bfloat16)
    outcomes = [residual.clone() for _ in range(3)]
    for outcome in outcomes:
        block(weights, norm, Routing(3, True))(outcome)
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


def test_a_residual_stream_whose_rows_lie_apart(case, device):
    residual, weights, norm = case(5)
    apart = torch.full((5, 64), 7.0, device=device)
    apart[:, :40] = residual
    view = apart[:, :40]
    truth = truth_of(view, weights, norm, Routing(2, True))
    block(weights, norm, Routing(2, True))(view)
    agree(view, truth)
    assert (apart[:, 40:] == 7).all()


@pytest.mark.parametrize("tokens", [1, 30, 64, 100, 200])
@pytest.mark.parametrize(("count", "per_token"), [(5, 2), (33, 8), (300, 3)])
def test_the_table_of_assignments(tokens, count, per_token, draw, device):
    x, router = draw(tokens, 40).to(device), draw(count, 40).to(device)
    got = assign(x, router, Routing(per_token, True))
    logits = functional.linear(x, router).double()
    scale, chosen = choose(logits, Routing(per_token, True))
    chosen, by_expert = chosen.sort(dim=1)
    torch.testing.assert_close(got.scale.double(), scale.gather(1, by_expert), rtol=1e-4, atol=1e-6)
    flat = chosen.flatten()
    assert torch.equal(got.order.long(), flat.argsort(stable=True))
    lengths = torch.bincount(flat, minlength=count)
    assert torch.equal(got.start.long(), lengths.cumsum(0) - lengths)


@pytest.mark.parametrize("block_t", [1, 4, 16])
@pytest.mark.parametrize("experts_count", [1, 3, 8])
def test_the_bound_of_blocks_is_reached_and_never_passed(block_t, experts_count):
    for assignments in range(1, 60):
        worst = 0
        for chosen in range(1, min(assignments, experts_count) + 1):
            lengths = [1] * (chosen - 1) + [assignments - chosen + 1]
            worst = max(worst, sum(-(-length // block_t) for length in lengths))
        assert most_blocks(assignments, experts_count, block_t) == worst


def test_larger_tiles_are_for_more_tokens_of_an_expert():
    few, many = (
        Tile(size, ProductTile(64, 64, 4, 2), ProductTile(64, 64, 4, 2)) for size in (1, 2)
    )
    table = ((8, few), (ANY, many))
    assert choose_tile(table, 64, 8) is few
    assert choose_tile(table, 65, 8) is many
    assert choose_tile(table, 10**9, 8) is many


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0), None])
@pytest.mark.parametrize("number_bytes", [2, 4])
def test_tiles_fit_the_memory_of_their_devices(number_bytes, capability):
    kilobytes = 227 if capability in ((9, 0), None) else 99
    table = table_for(number_bytes, capability)
    assert table[-1][0] == ANY
    for _, tile in table:
        for part in (tile.gate_up, tile.down):
            stage = (tile.block_t + part.block_n) * part.block_k * number_bytes
            assert stage * part.stages <= kilobytes << 10


@pytest.mark.parametrize("part", ["router", "gate_up", "down"])
def test_weights_whose_rows_are_not_one_after_another_are_refused(part, case):
    _, weights, norm = case(1)
    apart = getattr(weights, part).transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(ValueError, match=f"experts' {part} .* is not contiguous"):
        block(weights._replace(**{part: apart}), norm, Routing(2, True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("count", "per_token", "hidden", "width"),
    [(8, 2, 1024, 3584), (128, 8, 768, 256), (60, 4, 1000, 352)],
)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 33, 64, 200, 1000])
def test_models_shapes(tokens, count, per_token, hidden, width, dtype, case):
    """With the measured tiles."""
    args = case(tokens, count, hidden, width, dtype)
    check(*args, Routing(per_token, True), tiles=None)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_a_captured_block_follows_its_input(tokens, case):
    residual, weights, norm = case(tokens, 128, 512, 256, torch.bfloat16)
    run = block(weights, norm, Routing(8, True), tiles=None)
    run(residual.clone())
    inputs = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = torch.randn_like(residual)
        expected = fresh.clone()
        run(expected)
        inputs.copy_(fresh)
        graph.replay()
        assert torch.equal(inputs, expected)


SOFTMAX, SIGMOID = Routing(3, True), Routing(3, False, Score.SIGMOID)
GROUPS = Routing(3, True, Score.SIGMOID, groups=4, chosen_groups=2, group_best=2)


def _multiply_in_order(monkeypatch):
    """Sum the products of interpreted dots one after the other.

    NumPy's own asks a BLAS, whose order depends on the machine and on the number of rows; that of
    a GPU's matrix unit doesn't.
    """

    def matmul(a, b, dtype):
        total = np.zeros((a.shape[0], b.shape[1]), dtype)
        for k in range(a.shape[1]):
            total += a[:, k : k + 1].astype(dtype) * b[k : k + 1].astype(dtype)
        return total

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.parametrize(
    ("routing", "dtype"),
    [
        pytest.param(SOFTMAX, torch.float32, id="softmax-float32"),
        pytest.param(SOFTMAX, torch.bfloat16, id="softmax-bfloat16", marks=pytest.mark.slow),
        pytest.param(SIGMOID, torch.float32, id="sigmoid-float32", marks=pytest.mark.slow),
        pytest.param(SIGMOID, torch.bfloat16, id="sigmoid-bfloat16"),
        pytest.param(GROUPS, torch.float32, id="groups-float32"),
        pytest.param(GROUPS, torch.bfloat16, id="groups-bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("hidden", [520, pytest.param(4096, marks=pytest.mark.gpu)])
def test_a_row_chooses_the_same_experts_alone_and_at_every_place(
    hidden, routing, dtype, draw, device, monkeypatch
):
    """To the last bit, and with the same weights, by what `prepare_experts` launches."""
    count, rows, sizes = 128, 256, (2, 16, 65, 256, 2048)
    if INTERPRETED:
        _multiply_in_order(monkeypatch)
        count, rows, sizes = 32, 8, (2, 16, 65, 256)
        # Few programs, so that the largest sizes sum segments in one, as thousands of tokens do.
        monkeypatch.setattr(expert_routing, "SCORE_PROGRAMS", 4)
    weights = ExpertWeights(
        router=draw(count, hidden).to(dtype).to(device),
        gate_up=draw(count, 32, hidden).to(dtype).to(device),
        down=draw(count, hidden, 16).to(dtype).to(device),
    )
    if routing.score is Score.SIGMOID:
        weights = weights._replace(correction=draw(count).to(device) * 1e-3)
    norm = RowNorm(draw(hidden).abs().to(dtype).to(device), 1e-6)
    x = draw(rows, hidden).to(dtype).to(device)
    found = []
    chosen_by = experts.assign

    def noted(*given):
        found.append(chosen_by(*given))
        return found[-1]

    monkeypatch.setattr(experts, "assign", noted)
    # Which experts compute is not asked here: that takes long, interpreted.
    for name in ("multiply", "_add_sum"):
        monkeypatch.setattr(experts, name, lambda *given: None)
    run = block(weights, norm, routing)

    def choice(residual):
        run(residual)
        return found[-1].chosen, found[-1].scale

    each = [choice(x[i : i + 1]) for i in range(rows)]
    alone = [torch.cat(column) for column in zip(*each, strict=True)]
    for together in sizes:
        # Every row is at every place once; interpreted, of many only at some.
        for shift in range(2 if INTERPRETED and together > 16 else rows):
            which = (torch.arange(together, device=device) + shift) % rows
            for got, expected in zip(choice(x[which]), alone, strict=True):
                assert torch.equal(got, expected[which]), (together, shift)
