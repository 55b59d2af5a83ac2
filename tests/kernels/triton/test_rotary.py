"""Rotation, the heads' norms and the write to the pool: against the reference."""

from __future__ import annotations

import pytest
import torch

from tokenpod.kernels import reference
from tokenpod.kernels.ops import HeadNorm, Rotation
from tokenpod.kernels.triton import rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = 150


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh tensors hold NaN: what a kernel does not write shows."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, torch.nan, **how))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [20, 96])
def test_angles(head_dim, dtype, device):
    positions = torch.tensor([0, 1, 4097, 131071], device=device)
    frequencies = (1 / 500000 ** (torch.arange(0, head_dim, 2) / head_dim)).to(device)
    expected = reference.rotate(positions, frequencies, 1.3, dtype)
    got = rotary.rotate(positions, frequencies, 1.3, dtype)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == (4, 1, head_dim // 2)
        torch.testing.assert_close(a, b, rtol=0, atol=2 * torch.finfo(dtype).eps)


def check(tokens, heads, kv_heads, head_dim, normed, dtype, draw, device):
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(SLOTS - 1, generator=generator)[:tokens].to(device)
    qkv = draw(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype).to(device)
    norm = None
    if normed:
        weights = draw(2, head_dim, dtype=dtype).to(device)
        norm = HeadNorm(weights[0], weights[1], 1e-6)
    angles = draw(tokens, 1, head_dim // 2).to(device) * 3
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
    pools = []
    for ops in (reference, rotary):
        keys = torch.full((SLOTS, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
        values = keys.clone()
        before = qkv.clone()
        q = ops.store_key_value(before, rotation, norm, keys, values, slots)
        assert q.shape == (tokens, heads, head_dim)
        assert torch.equal(before, qkv)
        pools.append((q, keys, values))
    (_, _, values_expected), (_, _, values) = pools
    assert torch.equal(values, values_expected)
    for expected, got in zip(*pools, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_few_tokens(tokens, normed, dtype, draw, device):
    check(tokens, 6, 2, 16, normed, dtype, draw, device)


@pytest.mark.parametrize("head_dim", [10, 80, 96, 128])
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (12, 1)], ids=str)
def test_every_shape_of_heads(heads, head_dim, draw, device):
    check(2, *heads, head_dim, True, torch.float32, draw, device)


def test_many_tokens(draw, device):
    check(rotary.MANY_TOKENS, 12, 3, 16, True, torch.bfloat16, draw, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (16, 16), (14, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 149])
def test_models_shapes(tokens, head_dim, heads, dtype, draw, device):
    check(tokens, *heads, head_dim, True, dtype, draw, device)
    check(tokens, *heads, head_dim, False, dtype, draw, device)
