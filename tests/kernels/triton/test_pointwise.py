"""Norm and gate: against the reference in float64, outputs poisoned before."""

from __future__ import annotations

import pytest
import torch

from tokenpod.kernels.backends import reference
from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.kernels.pointwise import triton_pointwise as pointwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: One of them is a gate always.
ALONE = [each for each in Activation if each is not Activation.SWIGLU_CLAMPED]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh tensors hold NaN: what a kernel does not write shows."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, torch.nan, **how))


def error(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()


def bound(dtype):
    return 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 72, 4096, 5000])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rms_norm(tokens, n, dtype, draw, device):
    x, weight = (draw(tokens, n, dtype=dtype) * 3).to(device), draw(n, dtype=dtype).to(device)
    before = x.clone()
    got = pointwise.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert torch.equal(x, before)
    assert error(got, reference.rms_norm(x.double(), weight.double(), 1e-5)) < bound(dtype)
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_rows_that_are_part_of_wider_ones(draw, device):
    x, weight = draw(3, 100).to(device)[:, :64], draw(64).to(device)
    got = pointwise.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_survives_squares_beyond_half_precision(draw, device):
    x = (draw(3, 64, dtype=torch.float16) * 3000).to(device)
    assert pointwise.rms_norm(x, x[0], 1e-6).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_with_a_weight_of_more_bits_is_rounded_once(dtype, draw, device):
    x, weight = (draw(3, 72, dtype=dtype) * 3).to(device), draw(72).to(device)
    got = pointwise.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert error(got, reference.rms_norm(x.double(), weight.double(), 1e-5)) < bound(dtype) / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 72, 5000])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine, n, dtype, draw, device):
    x = (draw(3, n + 3, dtype=dtype) * 3 + 1).to(device)[:, :n]
    weight, bias = draw(2, n, dtype=dtype).to(device) if affine else (None, None)
    got = pointwise.layer_norm(x, weight, bias, 1e-5)
    assert got.dtype == dtype
    exact = [None if part is None else part.double() for part in (x, weight, bias)]
    truth = reference.layer_norm(*exact, 1e-5)
    assert (got.double() - truth).norm() <= bound(dtype) * (truth.norm() + 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_normed_in_its_place(dtype, draw, device):
    """As the sum and the norm one after the other: the sum is rounded before."""
    x, y = (draw(2, 5, 72, dtype=dtype) * 3 + 1).to(device)
    weight, bias = draw(2, 72, dtype=dtype).to(device)
    expected = pointwise.layer_norm(x + y, weight, bias, 1e-5)
    pointwise.add_layer_norm(x, y, weight, bias, 1e-5)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ALONE)
def test_an_activation_by_itself(activation, dtype, draw, device):
    x = (draw(3, 1500, dtype=dtype) * 4).to(device)
    got = pointwise.activate(x.clone(), activation)
    tolerance = 1e-5 if dtype == torch.float32 else bound(dtype)
    assert error(got, reference.activate(x.double(), activation)) < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("shape", [(1, 40), (3, 1500)], ids=str)
def test_gated_unit(shape, activation, dtype, draw, device):
    tokens, n = shape
    gate_up = (draw(tokens, 2 * n, dtype=dtype) * 4).to(device)
    got = pointwise.act_mul(gate_up, activation)
    assert got.shape == shape
    truth = reference.act_mul(gate_up.double(), activation)
    tolerance = 1e-5 if dtype == torch.float32 else bound(dtype)
    assert error(got, truth) < tolerance


def test_gates_far_from_zero_saturate(device):
    gate_up = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]], device=device)
    for activation in Activation:
        got = pointwise.act_mul(gate_up, activation)
        expected = torch.tensor([[0.0, 0.0, 100.0, 1e4]], device=device)
        if activation is Activation.RELU_SQUARED:
            expected = expected**2
        elif activation is Activation.SWIGLU_CLAMPED:
            # Gates end at 7, and one is added to what they are multiplied with.
            most = torch.tensor(7.0, device=device)
            expected = (expected > 0) * 2 * most * torch.sigmoid(1.702 * most)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("activation", Activation)
def test_gates_that_are_no_numbers_stay_that(activation, device):
    nan = float("nan")
    got = pointwise.act_mul(torch.tensor([[nan, 1.0, 1.0, nan]], device=device), activation)
    assert got.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 72, 4096, 5000, 8192, 16384])
@pytest.mark.parametrize("tokens", [1, 7, 300, 5000])
def test_rows_of_every_size(tokens, n, dtype, draw, device):
    x, weight = draw(tokens, 2 * n, dtype=dtype).to(device), draw(2 * n, dtype=dtype).to(device)
    if n <= 8192:
        truth = reference.rms_norm(x.double(), weight.double(), 1e-5)
        assert error(pointwise.rms_norm(x, weight, 1e-5), truth) < bound(dtype)
    truth = reference.act_mul(x.double(), Activation.SILU)
    tolerance = 1e-5 if dtype == torch.float32 else bound(dtype)
    assert error(pointwise.act_mul(x, Activation.SILU), truth) < tolerance


def test_gelu_of_short_numbers_is_off_by_little_more_than_rounding(device):
    """Each number for itself, also where the result is small."""
    x = torch.linspace(-5.5, 8, 5000).to(torch.float16)[None].to(device)
    truth = torch.nn.functional.gelu(x.double().cpu())
    got = pointwise.activate(x, Activation.GELU).double().cpu()  # in x's place
    normal = truth.abs() > torch.finfo(torch.float16).smallest_normal
    off = (got - truth).abs() / truth.abs()
    assert off[normal].max() < torch.finfo(torch.float16).eps / 2 + 2e-4
    edges = torch.tensor([[float("nan"), float("inf"), -1000.0, 0.0]]).to(torch.float16).to(device)
    got = pointwise.activate(edges, Activation.GELU)[0].tolist()
    assert got[0] != got[0]
    assert got[1:] == [float("inf"), 0.0, 0.0]
