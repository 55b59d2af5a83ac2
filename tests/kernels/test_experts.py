"""Mixtures of experts: the reference against a formula a token at a time, the CPU's against it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from tokenpod.kernels.backends import cpu, reference
from tokenpod.kernels.experts.reference_experts import choose, mixture
from tokenpod.kernels.operations.expert_ops import ExpertWeights, Routing, Score, Shared
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.operations.weight import StackedWeight
from tokenpod.kernels.products.formats import MADE_AT_LOAD
from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight

pytestmark = pytest.mark.compute

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUTINGS = [Routing(1, False), Routing(2, True), Routing(3, False), Routing(5, True)]
HIDDEN, WIDTH, COUNT = 24, 16, 5


@pytest.fixture
def case(draw):
    """A residual stream, experts and a norm."""

    def make(tokens, dtype=torch.float32, count=COUNT):
        weights = ExpertWeights(
            router=draw(count, HIDDEN, dtype=dtype),
            gate_up=draw(count, 2 * WIDTH, HIDDEN, dtype=dtype) * HIDDEN**-0.5,
            down=draw(count, HIDDEN, WIDTH, dtype=dtype) * WIDTH**-0.5,
        )
        return draw(tokens, HIDDEN, dtype=dtype), weights, RowNorm(draw(HIDDEN, dtype=dtype), 1e-6)

    return make


def added(ops, residual, weights, norm, routing, activation=Activation.SILU):
    """What the block adds to `residual`, in place; [T, hidden]."""
    changed = residual.clone()
    assert ops.prepare_experts(weights, norm, activation, routing)(changed) is None
    return changed - residual


def truth_of(residual, weights, norm, routing):
    """What is added, in float64 but for the norm: rounding may not choose experts."""
    wide = ExpertWeights(*(weight if weight is None else weight.double() for weight in weights))
    return mixture(cpu.rms_norm(residual, *norm).double(), wide, Activation.SILU, routing)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_the_reference_is_the_weighted_sum_over_a_tokens_experts(routing, case):
    residual, weights, norm = case(4)
    got = added(reference.OPERATIONS, residual, weights, norm, routing)
    for token, x in enumerate(reference.rms_norm(residual, *norm)):
        probabilities = (weights.router @ x).softmax(0)
        best = probabilities.sort(descending=True).indices[: routing.per_token].tolist()
        shares = probabilities[best] / (probabilities[best].sum() if routing.normalised else 1)
        expected = torch.zeros(HIDDEN)
        for share, expert in zip(shares, best, strict=True):
            gate, up = (weights.gate_up[expert] @ x).chunk(2)
            expected += share * (weights.down[expert] @ (functional.silu(gate) * up))
        torch.testing.assert_close(got[token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(5, "slow")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_a_cpus_experts(tokens, routing, dtype, case):
    residual, weights, norm = case(tokens, dtype)
    truth = truth_of(residual, weights, norm, routing)
    ops = cpu.OPERATIONS
    got = added(ops, residual, weights, norm, routing)
    assert got.dtype == dtype
    error = ((got.double() - truth).norm() / truth.norm()).item()
    assert error < 8 * torch.finfo(dtype).eps


COMPILED = [(torch.float32, Int4Weight), (torch.bfloat16, Int8Weight)]


def stacked(format_, dense):
    """All experts of a dense stack in a format."""
    return StackedWeight(format_.made_of(dense.flatten(0, 1).float()), len(dense))


# A loop is compiled for each pair of a type and whole numbers of 8 or 4 bits.
@pytest.mark.parametrize(
    ("dtype", "format_"),
    [
        pytest.param(dtype, format_, marks=[pytest.mark.slow] * ((dtype, format_) in COMPILED))
        for dtype in (torch.float32, torch.bfloat16)
        for format_ in (*MADE_AT_LOAD.values(), GroupedWeight)
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_experts_in_formats_of_fewer_bits(format_, dtype, case, draw):
    """Each product as the format's own says, whatever is around it."""
    residual, weights, norm = case(7, dtype)
    weights = weights._replace(
        gate_up=stacked(format_, weights.gate_up),
        down=stacked(format_, weights.down),
        gate_up_bias=draw(COUNT, 2 * WIDTH, dtype=dtype),
    )
    x = reference.rms_norm(residual, *norm).float()
    shares, chosen = choose(x @ weights.router.float().t(), Routing(2, True))
    expected = torch.zeros(7, HIDDEN)
    for token, place in itertools.product(range(7), range(2)):
        expert = int(chosen[token, place])
        bias = weights.gate_up_bias[expert].float()
        gate, up = weights.gate_up.expert(expert).multiply(x[token, None], bias)[0].chunk(2)
        inner = (functional.silu(gate) * up)[None]
        expected[token] += (
            shares[token, place] * weights.down.expert(expert).multiply(inner, None)[0]
        )
    for ops in (reference.OPERATIONS, cpu.OPERATIONS):
        got = added(ops, residual, weights, norm, Routing(2, True)).float()
        error = (got - expected).norm() / expected.norm()
        # Numbers that are rounded after others were may go to the other neighbour.
        assert error < (2e-3 if dtype == torch.float32 else 3e-2)


ROUTERS = {
    "sigmoid": Routing(2, True, Score.SIGMOID, scale=2.5),
    "one-of-three-groups": Routing(2, False, groups=3, chosen_groups=1),
    "two-of-three-groups": Routing(
        3, True, Score.SIGMOID, groups=3, chosen_groups=2, group_best=2, least_sum=1e-20
    ),
    "sparsemixer": Routing(2, False, Score.SPARSEMIXER, tolerance=0.6),
    "least-sum": Routing(2, True, least_sum=1.5),
}


@pytest.mark.parametrize("routing", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_kind_of_router(tokens, routing, case, draw):
    """With all biases, and what is normed already."""
    residual, weights, _ = case(tokens, count=6)
    weights = weights._replace(
        router_bias=draw(6),
        correction=None if routing.score is Score.SPARSEMIXER else draw(6),
        gate_up_bias=draw(*weights.gate_up.shape[:2]),
        down_bias=draw(*weights.down.shape[:2]),
    )
    wide = ExpertWeights(*(None if weight is None else weight.double() for weight in weights))
    truth = mixture(residual.double(), wide, Activation.SWIGLU_CLAMPED, routing)
    ops = cpu.OPERATIONS
    got = residual.clone()
    block = ops.prepare_experts(weights, None, Activation.SWIGLU_CLAMPED, routing)
    block(residual, got)
    torch.testing.assert_close((got - residual).double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_shared_is_rounded_with_the_sum(dtype, gated, case, draw):
    residual, weights, norm = case(6, dtype)
    made, gate = draw(6, HIDDEN, dtype=dtype), draw(6, 1, dtype=dtype) if gated else None
    truth = residual.double() + truth_of(residual, weights, norm, Routing(2, True))
    truth += made.double() * (1.0 if gate is None else gate.double().sigmoid())
    for ops in (reference.OPERATIONS, cpu.OPERATIONS):
        got = residual.clone()
        block = ops.prepare_experts(weights, norm, Activation.SILU, Routing(2, True))
        block(got, None, Shared(made, gate))
        error = (got.double() - truth).norm() / truth.norm()
        assert error < 8 * torch.finfo(dtype).eps


def by_hand(logits, correction, routing):
    """A token's experts and their weights, one after the other."""
    scores = {
        Score.SOFTMAX: lambda: logits.softmax(0),
        Score.SIGMOID: lambda: 1 / (1 + (-logits).exp()),
    }[routing.score]()
    ranks = (scores + correction).tolist()
    size = len(ranks) // routing.groups
    groups = [range(first, first + size) for first in range(0, len(ranks), size)]
    best = [sorted((ranks[e] for e in group), reverse=True) for group in groups]
    groups.sort(key=lambda group: -sum(best[group[0] // size][: routing.group_best]))
    seen = [expert for group in groups[: routing.chosen_groups] for expert in group]
    chosen = sorted(seen, key=lambda e: -ranks[e])[: routing.per_token]
    total = max(sum(scores[e] for e in chosen), routing.least_sum) if routing.normalised else 1
    return {expert: float(scores[expert] / total * routing.scale) for expert in chosen}


@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "sparsemixer"])
def test_a_choice_is_what_one_makes_by_hand(name, draw):
    logits, correction = draw(20, 6), draw(6)
    weights, experts = choose(logits, ROUTERS[name], correction)
    for row, (shares, chosen) in enumerate(zip(weights.tolist(), experts.tolist(), strict=True)):
        expected = by_hand(logits[row], correction, ROUTERS[name])
        assert dict(zip(chosen, shares, strict=True)) == pytest.approx(expected, rel=1e-4)


def test_sparsemixer_weighs_each_among_those_near_it():
    logits = torch.tensor([[4.0, 3.0, 1.0, 2.9], [-1.0, -1.5, -9.0, -8.0]])
    weights, experts = choose(logits, Routing(2, False, Score.SPARSEMIXER, tolerance=0.3))
    assert experts.tolist() == [[0, 1], [0, 1]]
    first = torch.tensor([4.0, 3.0, 2.9]).softmax(0)[0]
    second = torch.tensor([3.0, 2.9]).softmax(0)[0]
    assert weights[0].tolist() == pytest.approx([float(first), float(second)])
    assert weights[1].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("activation", Activation)
def test_experts_gates(activation, case):
    residual, weights, norm = case(6)
    truth = added(reference.OPERATIONS, residual, weights, norm, Routing(2, True), activation)
    ops = cpu.OPERATIONS
    got = added(ops, residual, weights, norm, Routing(2, True), activation)
    torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-5)


def test_all_tokens_may_choose_one_expert(case):
    residual, weights, norm = case(9)
    residual, norm = residual.abs(), norm._replace(weight=norm.weight.abs())
    weights.router[:] = 0
    weights.router[3] = 1
    for ops in (reference.OPERATIONS, cpu.OPERATIONS):
        got = added(ops, residual, weights, norm, Routing(1, True))
        inner = reference.rms_norm(residual, *norm)
        gated = reference.act_mul(inner @ weights.gate_up[3].T, Activation.SILU)
        torch.testing.assert_close(got, gated @ weights.down[3].T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", [reference, cpu], ids=lambda ops: ops.__name__)
def test_a_token_that_holds_nan_spoils_no_other(ops, case):
    residual, weights, norm = case(7)
    block = ops.OPERATIONS.prepare_experts(weights, norm, Activation.SILU, Routing(2, False))
    expected, got = residual.clone(), residual.clone()
    got[4, 3] = torch.nan
    block(expected)
    block(got)
    assert got[4].isnan().all()
    keep = [0, 1, 2, 3, 5, 6]
    torch.testing.assert_close(got[keep], expected[keep], rtol=1e-5, atol=1e-6)
