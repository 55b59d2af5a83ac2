"""Rotation, the heads' norms and the write to the pool: against the reference."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from tokenpod.kernels.backends import reference
from tokenpod.kernels.cache import triton_rotary as rotary
from tokenpod.kernels.operations.attention_ops import KVScales
from tokenpod.kernels.operations.pointwise_ops import HeadNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = 150


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh tensors hold NaN: what a kernel does not write shows."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, torch.nan, **how))


def frequencies_of(head_dim, device):
    return (1 / 500000 ** (torch.arange(0, head_dim, 2) / head_dim)).to(device)


@pytest.mark.parametrize("head_dim", [20, 96])
def test_angles_of_many_tokens_are_found_once(head_dim, device):
    positions = torch.arange(rotary.MANY_TOKENS, device=device) * 2081
    frequencies = frequencies_of(head_dim, device)
    expected = reference.rotate(positions, frequencies, 1.3, torch.float32)
    got = rotary.rotate(positions, frequencies, 1.3, torch.bfloat16)
    for a, b in ((got.cos, expected.cos), (got.sin, expected.sin)):
        torch.testing.assert_close(a, b.squeeze(1), rtol=0, atol=2**-22)


@pytest.mark.parametrize("tokens", [3, rotary.MANY_TOKENS])
@pytest.mark.parametrize("by_axes", [True, False])
def test_three_axes_turn_each_pair_by_its_own(tokens, by_axes, draw, device):
    """A rotation of one axis goes by time."""
    positions = torch.arange(3 * tokens, device=device).view(3, -1) * 77
    axes = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 1, 0], device=device) if by_axes else None
    qkv, slots = draw(tokens, 3 * 20).to(device), torch.arange(tokens, device=device)
    found = []
    for ops in (reference, rotary):
        pools = torch.zeros(2, SLOTS, 1, 20, device=device)
        angles = ops.rotate(positions, frequencies_of(20, device), 1.3, torch.float32, axes)
        q = ops.store_key_value(qkv.clone(), angles, None, *pools, slots)
        found.append(torch.cat((q.flatten(), pools.flatten())))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    one = reference.rotate(positions[1], frequencies_of(20, device), 1.3, torch.float32)
    several = reference.rotate(positions, frequencies_of(20, device), 1.3, torch.float32, axes)
    same = (several.cos == one.cos).all(0)[0]
    assert same.nonzero()[:, 0].tolist() == ([3, 4, 8] if by_axes else [])


@pytest.mark.parametrize("tokens", [2, rotary.MANY_TOKENS])
def test_pairs_of_frequency_zero_are_left_alone(tokens, draw, device):
    """Also by the scale: they are no part of the rotation."""
    qkv = draw(tokens, 3 * 32).to(device)
    positions, slots = torch.arange(tokens, device=device) * 77, torch.arange(tokens, device=device)
    frequencies = frequencies_of(32, device)
    frequencies[5:] = 0
    found = []
    for ops in (reference, rotary):
        pools = torch.zeros(2, SLOTS, 1, 32, device=device)
        angles = ops.rotate(positions, frequencies, 1.3, torch.float32)
        q = ops.store_key_value(qkv.clone(), angles, None, *pools, slots)
        assert torch.equal(q[:, 0, 5:16], qkv[:, 5:16])
        assert torch.equal(pools[0, :tokens, 0, 21:], qkv[:, 53:64])
        found.append(q)
    torch.testing.assert_close(*found)


def test_few_tokens_and_many_turn_a_head_the_same(draw, device):
    """A token's key must not depend on how long the step was that computed it."""
    qkv = draw(rotary.MANY_TOKENS, 4 * 32).to(device)
    positions = torch.arange(rotary.MANY_TOKENS, device=device) * 2081
    slots = torch.arange(rotary.MANY_TOKENS, device=device)
    keys = []
    for tokens in (rotary.MANY_TOKENS, rotary.MANY_TOKENS - 1):
        pools = torch.zeros(2, SLOTS, 1, 32, device=device)
        angles = rotary.rotate(positions[:tokens], frequencies_of(32, device), 1.0, torch.float32)
        rotary.store_key_value(qkv[:tokens], angles, None, *pools, slots[:tokens])
        keys.append(pools[0, : rotary.MANY_TOKENS - 1])
    assert torch.equal(*keys)


def check(tokens, heads, kv_heads, head_dim, normed, dtype, draw, device, value_dim=None):
    value_dim = value_dim or head_dim
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(SLOTS - 1, generator=generator)[:tokens].to(device)
    width = (heads + kv_heads) * head_dim + kv_heads * value_dim
    qkv = draw(tokens, width, dtype=dtype).to(device)
    norm = None
    if normed:
        weights = draw(2, head_dim, dtype=dtype).to(device)
        norm = HeadNorm(weights[0], weights[1], 1e-6)
    positions = torch.randint(131072, (tokens,), generator=generator).to(device)
    pools = []
    for ops in (reference, rotary):
        keys = torch.full((SLOTS, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
        values = torch.full((SLOTS, kv_heads, value_dim), 7.0, dtype=dtype, device=device)
        before = qkv.clone()
        rotation = ops.rotate(positions, frequencies_of(head_dim, device), 1.1, dtype)
        q = ops.store_key_value(before, rotation, norm, keys, values, slots)
        assert q.shape == (tokens, heads, head_dim)
        assert torch.equal(before, qkv)
        pools.append((q, keys, values))
    (_, _, values_expected), (_, _, values) = pools
    assert torch.equal(values, values_expected)
    for expected, got in zip(*pools, strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=8 * eps, atol=16 * eps)


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_few_tokens(tokens, normed, dtype, draw, device):
    check(tokens, 6, 2, 16, normed, dtype, draw, device)


@pytest.mark.parametrize("tokens", [3, rotary.MANY_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_normed_without_a_weight(tokens, dtype, draw, device):
    qkv = draw(tokens, (4 + 2 * 2) * 16, dtype=dtype).to(device)
    norm = HeadNorm(*draw(2, 16).to(device), 1e-3, values=True)
    slots = torch.arange(tokens, device=device)
    found = []
    for ops in (reference, rotary):
        pools = torch.zeros(2, SLOTS, 2, 16, dtype=dtype, device=device)
        rotation = ops.rotate(slots, frequencies_of(16, device), 1.0, dtype)
        ops.store_key_value(qkv.clone(), rotation, norm, *pools, slots)
        found.append(pools[1, :tokens])
    values = qkv.view(tokens, 8, 16)[:, 6:].float()
    expected = values * (values.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    eps = torch.finfo(dtype).eps
    for got in found:
        torch.testing.assert_close(got, expected.to(dtype), rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("tokens", [3, rotary.MANY_TOKENS])
def test_queries_without_keys_and_values(tokens, draw, device):
    """Of a layer that reads another's."""
    q = draw(tokens, 4 * 16).to(device)
    norm = HeadNorm(*draw(1, 16).to(device).expand(2, 16), 1e-3)
    slots, none = torch.arange(tokens, device=device), torch.empty((SLOTS, 0, 16), device=device)
    found = []
    for ops in (reference, rotary):
        rotation = ops.rotate(slots * 77, frequencies_of(16, device), 1.0, torch.float32)
        found.append(ops.store_key_value(q.clone(), rotation, norm, none, none, slots))
    torch.testing.assert_close(*found)


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("head_dim", [10, 80, 96, 128])
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (12, 1)], ids=str)
def test_every_shape_of_heads(heads, head_dim, draw, device):
    check(2, *heads, head_dim, True, torch.float32, draw, device)


@pytest.mark.parametrize("tokens", [3, rotary.MANY_TOKENS])
@pytest.mark.parametrize("value_dim", [6, 40])
def test_values_of_another_size_than_keys(value_dim, tokens, draw, device):
    check(tokens, 6, 3, 20, True, torch.bfloat16, draw, device, value_dim=value_dim)


def test_many_tokens(draw, device):
    check(rotary.MANY_TOKENS, 12, 3, 16, True, torch.bfloat16, draw, device)


@pytest.mark.sampled(4, "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [5, rotary.MANY_TOKENS])
def test_keys_and_values_of_8_bits(tokens, dtype, draw, device):
    """As multiples of each head's scale; what is too large is the largest, and NaN stays NaN."""
    heads, kv_heads, head_dim = 6, 3, 16
    qkv = draw(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype).to(device)
    qkv[1, -20:-17] = torch.tensor([3e4, -3e4, float("nan")], dtype=dtype)
    scales = KVScales(*torch.tensor([[0.01, 0.003, 2.0], [0.5, 0.0007, 1.0]], device=device))
    slots = torch.arange(tokens, device=device) + 3
    pools = []
    for ops in (reference, rotary):
        pool = torch.zeros(2, SLOTS, kv_heads, head_dim, device=device).to(torch.float8_e4m3fn)
        angles = ops.rotate(slots * 700, frequencies_of(head_dim, device), 1.0, dtype)
        ops.store_key_value(qkv.clone(), angles, None, *pool, slots, scales)
        pools.append(pool)
    (expected_keys, expected_values), (keys, values) = pools
    bits = torch.uint8
    assert torch.equal(values.view(bits), expected_values.view(bits))
    assert values.float().abs().nan_to_num().max() == rotary.LARGEST
    assert values.isnan().sum() == 1
    # Rotation may differ in the last place, and end on the next multiple.
    both = [pool.float() * scales.keys[:, None] for pool in (keys, expected_keys)]
    torch.testing.assert_close(*both, rtol=1 / 7, atol=16 * torch.finfo(dtype).eps)
    assert (keys.view(bits) != expected_keys.view(bits)).float().mean() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (16, 16), (14, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 149])
def test_models_shapes(tokens, head_dim, heads, dtype, draw, device):
    check(tokens, *heads, head_dim, True, dtype, draw, device)
    check(tokens, *heads, head_dim, False, dtype, draw, device)


@pytest.mark.parametrize("tokens", [5, rotary.MANY_TOKENS])
def test_norms_of_heads_round_once_where_weights_are_float32(tokens, draw, device):
    """As transformers' Gemma 3 does in bfloat16; at position 0 nothing is turned."""
    head_dim, heads, kv_heads = 32, 3, 1
    qkv = draw(tokens, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16).to(device)
    norms = [Gemma3RMSNorm(head_dim, eps=1e-6) for _ in range(2)]
    for norm in norms:
        norm.weight.data.copy_(draw(head_dim))
        norm.to(device)
    # As models/weights/names.py reads them: 1 is part of the weight.
    query, key = (norm.weight.data.float() + 1 for norm in norms)
    pools = torch.zeros(2, SLOTS, kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    angles = rotary.rotate(zeros, frequencies_of(head_dim, device), 1.0, torch.bfloat16)
    slots = torch.arange(tokens, device=device)
    q = rotary.store_key_value(qkv, angles, HeadNorm(query, key, 1e-6), *pools, slots)
    split = qkv.view(tokens, -1, head_dim)
    with torch.no_grad():
        expected = [norms[0](split[:, :heads]), norms[1](split[:, heads : heads + kv_heads])]
    for got, want in zip((q, pools[0, :tokens]), expected, strict=True):
        # Roots may differ in the last place of float32, and so one of thousands in bfloat16.
        assert (got != want).float().mean() < 0.002
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
