"""Mixtures of experts: the reference against a formula a token at a time, the CPU's against it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tokenpod.kernels import cpu, reference
from tokenpod.kernels.cpu import compiled
from tokenpod.kernels.ops import Activation, ExpertWeights, Routing, RowNorm
from tokenpod.kernels.reference.experts import mixture

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUTINGS = [Routing(1, False), Routing(2, True), Routing(3, False), Routing(5, True)]
HIDDEN, WIDTH, COUNT = 24, 16, 5


def cpu_operations(dtype):
    """Those that a CPU has for `dtype`."""
    both = [cpu.OPERATIONS, compiled.OPERATIONS]
    return both if dtype != torch.float16 else both[:1]


@pytest.fixture
def case(draw):
    """A residual stream, experts and a norm."""

    def make(tokens, dtype=torch.float32):
        weights = ExpertWeights(
            router=draw(COUNT, HIDDEN, dtype=dtype),
            gate_up=draw(COUNT, 2 * WIDTH, HIDDEN, dtype=dtype) * HIDDEN**-0.5,
            down=draw(COUNT, HIDDEN, WIDTH, dtype=dtype) * WIDTH**-0.5,
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
    wide = ExpertWeights(*(weight.double() for weight in weights))
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_a_cpus_experts(tokens, routing, dtype, case):
    residual, weights, norm = case(tokens, dtype)
    truth = truth_of(residual, weights, norm, routing)
    for ops in cpu_operations(dtype):
        got = added(ops, residual, weights, norm, routing)
        assert got.dtype == dtype
        error = ((got.double() - truth).norm() / truth.norm()).item()
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("activation", Activation)
def test_experts_gates(activation, case):
    residual, weights, norm = case(6)
    truth = added(reference.OPERATIONS, residual, weights, norm, Routing(2, True), activation)
    for ops in cpu_operations(torch.float32):
        got = added(ops, residual, weights, norm, Routing(2, True), activation)
        torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-5)


def test_all_tokens_may_choose_one_expert(case):
    residual, weights, norm = case(9)
    residual, norm = residual.abs(), norm._replace(weight=norm.weight.abs())
    weights.router[:] = 0
    weights.router[3] = 1
    for ops in (reference.OPERATIONS, *cpu_operations(torch.float32)):
        got = added(ops, residual, weights, norm, Routing(1, True))
        inner = reference.rms_norm(residual, *norm)
        gated = reference.act_mul(inner @ weights.gate_up[3].T, Activation.SILU)
        torch.testing.assert_close(got, gated @ weights.down[3].T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", [reference, cpu, compiled], ids=lambda ops: ops.__name__)
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
