"""The parts of sampling on the device, each beside its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tokenpod.engine.sampling.rng import token_noise, vocabulary_noise
from tokenpod.kernels.sampling.noise import (
    MOST_LUCK,
    exponential,
    precise_log,
    span_words,
    token_words,
)
from tokenpod.kernels.sampling.truncation import _border, falling_key


@triton.jit
def _log(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, precise_log(tl.load(x_ptr + at)))


@triton.jit
def _noise(seed_ptr, ids_ptr, position, stream_ptr, span_ptr, token_ptr, first, N: tl.constexpr):
    at = tl.arange(0, N)
    seed, stream = tl.load(seed_ptr), tl.load(stream_ptr)
    tl.store(span_ptr + at, exponential(span_words(seed, first, position, stream, N)))
    words = token_words(seed, tl.load(ids_ptr + at), position, stream)
    tl.store(token_ptr + at, exponential(words))


@triton.jit
def _keys(s_ptr, id_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, falling_key(tl.load(s_ptr + at), tl.load(id_ptr + at)))


@triton.jit
def _find(
    candidate_ptr,
    found,
    limit_ptr,
    target_ptr,
    centre_ptr,
    out_ptr,
    BY_MASS: tl.constexpr,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    border = _border(
        candidate_ptr,
        found,
        tl.load(limit_ptr),
        tl.load(target_ptr),
        tl.load(centre_ptr),
        BY_MASS,
        TYPICAL,
        BLOCK,
        PIVOTS,
    )
    tl.store(out_ptr, border)


def test_the_logarithm_is_precise_also_close_to_one(device):
    low, generator = torch.arange(1, 1025), torch.Generator().manual_seed(0)
    middle = torch.randint(1, 2**24, (2048,), generator=generator)
    steps = torch.cat([low, middle, 2**24 - low])
    x = (steps.to(torch.float32) * 2.0**-24).to(device)
    out = torch.full_like(x, float("nan"))
    _log[(1,)](x, out, N=len(x))
    exact = x.double().log().cpu()
    assert ((out.cpu().double() - exact).abs() <= 3e-7 * exact.abs()).all()


def test_the_logarithm_of_numbers_above_one(device):
    x = torch.linspace(1.0, 300_000.0, 512, device=device)
    out = torch.full_like(x, float("nan"))
    _log[(1,)](x, out, N=512)
    assert torch.allclose(out.cpu().double(), x.cpu().double().log(), rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("seed", "stream", "position", "first"),
    [(0, 0, 0, 0), (-(2**63) + 5, 2**32 - 1, 70_000, 128_000), (12345678901234, 3, 9, 64)],
)
def test_noise_has_the_bits_that_the_specification_gives(device, seed, stream, position, first):
    n = 64
    seeds, streams = torch.tensor([seed]), torch.tensor([stream])
    ids = torch.randperm(262_144, generator=torch.Generator().manual_seed(1))[:n]
    span, tokens = (torch.zeros(n, device=device) for _ in range(2))
    where = seeds.to(device), ids.to(device, torch.int32), position, streams.to(device)
    _noise[(1,)](*where, span, tokens, first, N=n)
    positions = torch.tensor([position])
    expected = vocabulary_noise(seeds, streams, positions, first + n)[0, first:]
    # The words are equal, or else nothing would be close; logarithms may round differently.
    assert torch.allclose(span.cpu(), expected, rtol=1e-6, atol=0)
    assert torch.allclose(
        tokens.cpu(), token_noise(seeds, streams, positions, ids), rtol=1e-6, atol=0
    )


def test_no_noise_is_luckier_than_the_bound(device):
    luckiest = torch.tensor([1 - 2.0**-24], device=device).log().neg().log().neg()
    assert 16.63 < float(luckiest) < MOST_LUCK.value


def test_keys_rise_as_scores_fall_with_the_lowest_id_first(device):
    s = torch.tensor([0.0, -0.0, -1e-30, -1.0, -1.0, -1.5, -700.0, -float("inf")])
    ids = torch.tensor([1, 2, 0, 3, 262_143, 0, 0, 0], dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int64, device=device)
    _keys[(1,)](s.to(device), ids.to(device), out, N=8)
    assert (out.diff() > 0).all()


def keys_of(s: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.abs(s).astype(np.float32).view(np.int32).astype(np.int64) << 20 | ids


def found_border(device, keys, *, target, limit=2**52 - 1, centre=0.0, mass=False, typical=False):
    out = torch.zeros(1, dtype=torch.int64, device=device)
    _find[(1,)](
        torch.from_numpy(np.random.default_rng(3).permutation(keys)).to(device),
        len(keys),
        torch.tensor([limit], device=device),
        torch.tensor([target], device=device),
        torch.tensor([centre], dtype=torch.float64, device=device),
        out,
        BY_MASS=mass,
        TYPICAL=typical,
        BLOCK=64,
        PIVOTS=4,
    )
    return int(out)


@pytest.fixture(scope="module")
def tied() -> tuple[np.ndarray, np.ndarray]:
    """Scores with ties, and ids."""
    random = np.random.default_rng(0)
    s = -np.sort(np.abs(random.normal(size=150) * 3)).astype(np.float32)
    s[20:60] = s[20]
    s -= s[0]
    return s, random.permutation(262_144)[:150]


@pytest.mark.parametrize("k", [1, 2, 30, 149, 150, 200])
def test_a_border_by_count_is_the_kth_key_or_the_last(device, tied, k):
    keys = np.sort(keys_of(*tied))
    assert found_border(device, keys, target=k) == keys[min(k, 150) - 1]


@pytest.mark.parametrize("share", [1e-9, 0.3, 0.9, 0.999, 1.5])
def test_a_border_by_mass_is_the_first_key_that_reaches_it(device, tied, share):
    keys = np.sort(keys_of(*tied))
    s = -(keys >> 20).astype(np.int32).view(np.float32)
    sums = np.exp(s.astype(np.float64)).cumsum()
    target = share * sums[-1]
    at = min(int((sums < target).sum()), 149)
    assert np.abs(sums - target).min() > 1e-6 * sums[-1] or share > 1
    assert found_border(device, keys, target=max(int(target * 2**44), 1), mass=True) == keys[at]


def test_a_border_leaves_out_what_is_beyond_the_limit(device, tied):
    keys = np.sort(keys_of(*tied))
    assert found_border(device, keys, target=80, limit=int(keys[49])) == keys[49]
    assert found_border(device, keys, target=40, limit=int(keys[49])) == keys[39]


@pytest.mark.parametrize("count", [1, 40, 150])
def test_a_typical_border_goes_by_distance(device, tied, count):
    s, ids = tied
    centre = -2.345
    distance = np.abs(s.astype(np.float64) - centre).astype(np.float32)
    expected = np.sort(keys_of(distance, ids))[count - 1]
    keys = keys_of(s, ids)
    assert found_border(device, keys, target=count, centre=centre, typical=True) == expected


def test_one_candidate_is_its_own_border(device):
    assert found_border(device, np.array([77]), target=1) == 77
