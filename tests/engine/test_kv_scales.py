"""What numbers of 8 bits are multiples of, measured on a pool in the model's type."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from support.kernels.layouts import alike
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.startup.assemble import EngineError, assemble
from tokenpod.engine.startup.kv_scales import EIGHT_BITS, MARGIN, measure_scales, random_prompt
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.kv_rounding import quantise
from tokenpod.kernels.gpu import launch
from tokenpod.kernels.operations.attention_ops import KVScales

CPU = torch.device("cpu")
LARGEST = torch.finfo(EIGHT_BITS).max


def make_pool(dtype=torch.bfloat16, scales=None):
    return KVPool(slots=9, layouts=[alike(3, 8)] * 2, dtype=dtype, device=CPU, scales=scales)


@pytest.fixture
def measured():
    """Of heads of very different sizes in six slots; the others hold what must not count."""
    pool = make_pool()
    generator = torch.Generator().manual_seed(1)
    for size, layer in zip((1, 300, 1e-3, 20), (*pool.keys, *pool.values), strict=True):
        layer.fill_(1e30)
        layer[:6] = torch.randn(6, 3, 8, generator=generator) * size
        layer[:6, 1] *= 50
    return pool, measure_scales(pool, 6)


def test_what_was_seen_fits_with_the_margin(measured):
    pool, scales = measured
    for layers, layer_scales in zip(
        (pool.keys, pool.values), zip(*scales, strict=True), strict=True
    ):
        for layer, scale in zip(layers, layer_scales, strict=True):
            most = layer[:6].float().abs().amax((0, 2))
            assert (most * MARGIN <= scale * LARGEST).all()
            assert (most * 2 * MARGIN > scale * LARGEST).all()


def test_scaling_rounds_no_more_than_the_type_does(measured):
    """Powers of two move the exponent alone: three bits of fraction are left of every number."""
    pool, scales = measured
    for layer, (scale, _) in zip(pool.keys, scales, strict=True):
        assert (torch.frexp(scale).mantissa == 0.5).all()
        seen = layer[:6].float()
        back = quantise(seen, scale).float() * scale[:, None]
        normal = seen.abs() > scale[:, None] * 2**-6
        assert normal.float().mean() > 0.9
        assert ((back - seen).abs() <= seen.abs() / 16)[normal].all()


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf")])
def test_a_head_that_says_nothing_is_stored_as_it_is(number):
    pool = make_pool(torch.float16)
    pool.keys[0][:4] = 3.0
    pool.keys[0][:4, 2] = number
    assert measure_scales(pool, 4)[0].keys[2] == 1


def test_a_pool_of_8_bits_takes_half_of_one_of_16():
    scales = [KVScales(torch.ones(3), torch.full((3,), 2.0))] * 2
    pool, wide = make_pool(EIGHT_BITS, scales), make_pool()
    assert [layer.dtype for layer in pool.keys + pool.values] == [EIGHT_BITS] * 4
    assert sum(layer.nbytes for layer in wide.keys) == 2 * sum(layer.nbytes for layer in pool.keys)
    assert [layer.values.tolist() for layer in pool.scales] == [[2.0] * 3] * 2
    shape = {"layouts": [alike(3, 8)] * 2}
    assert KVPool.bytes_per_slot(**shape, dtype=EIGHT_BITS) == 2 * 2 * 3 * 8


def test_the_prompt_is_the_same_for_every_rank():
    prompt = random_prompt(200, 97)
    assert prompt == random_prompt(200, 97)
    assert len(set(prompt)) > 60
    assert set(prompt) <= set(range(97))


def test_a_cpu_is_refused_in_one_line():
    options = EngineOptions("/model", None, "cpu", 1, 8, 64, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(EngineError, match=r"kv_cache_dtype is fp8_e4m3: .* GPU, and this is a CPU"):
        assemble(SimpleNamespace(), options, positions=64, device=CPU)


def test_scales_for_each_token_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(launch, "gpu_of", lambda device: launch.Gpu((9, 0), processors=108))
    options = EngineOptions("/model", None, "cuda", 1, 8, 64, kv_cache_dtype="int8")
    with pytest.raises(EngineError, match="int8: that is for CPUs, and this is a GPU"):
        assemble(SimpleNamespace(), options, positions=64, device=torch.device("cuda"))


def test_a_gpu_too_old_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(launch, "gpu_of", lambda device: launch.Gpu((8, 0), processors=108))
    options = EngineOptions("/model", None, "cuda", 1, 8, 64, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(EngineError, match=r"capability 8\.9 or more, and this one has 8\.0$"):
        assemble(SimpleNamespace(), options, positions=64, device=torch.device("cuda"))
