"""The CPU's operations other than attention against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from support.kernels.layouts import alike
from tokenpod.kernels.backends import cpu, reference
from tokenpod.kernels.backends.registry import operations_for
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.pointwise_ops import Activation, HeadNorm, RowNorm
from tokenpod.kernels.products import compiled_tiles
from tokenpod.kernels.products.compiled_panels import Ending, Panels
from tokenpod.kernels.products.cpu_product import (
    can_lay_out,
    filled_rows,
    laid_out,
    prepare_activated_linear,
)
from tokenpod.kernels.products.formats.narrow import NarrowWeight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [1, 2, 33]
#: Of weights of 16 bits; a loop is compiled for each.
BY_KIND = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


def test_a_cpu_gets_its_own_operations_and_other_devices_the_reference():
    assert operations_for(torch.device("cpu")) is cpu.OPERATIONS
    assert operations_for(torch.device("meta")) is reference.OPERATIONS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_looks_rows_up(dtype, draw):
    table = draw(10, 4, dtype=dtype)
    tokens = torch.tensor([3, 3, 9])
    assert torch.equal(cpu.embed(table, tokens), torch.stack([table[3], table[3], table[9]]))
    assert torch.equal(reference.embed(table, tokens), cpu.embed(table, tokens))
    # The rows of a slice are further apart than they are long.
    assert torch.equal(cpu.embed(table[:, :3], tokens), table[:, :3][tokens])


def test_a_token_that_is_none_reads_nothing_beyond_the_table(draw):
    table = draw(10, 4)
    got = cpu.embed(table, torch.tensor([-1, 10, 1 << 60]))
    assert torch.equal(got, table[[0, 9, 9]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "axes", [None, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])], ids=["one", "three"]
)
def test_angles_of_positions(axes, dtype):
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 1e-4, 0.0])
    positions = torch.tensor([0, 1, 77, 131_071])
    for where in (positions, torch.stack([positions, positions // 2, positions + 5])):
        if where.dim() == 1 and axes is not None:
            continue
        got = cpu.rotate(where, frequencies, 1.3, dtype, axes)
        expected = reference.rotate(where, frequencies, 1.3, dtype, axes)
        torch.testing.assert_close((got.cos, got.sin), (expected.cos, expected.sin))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_rms_norm(tokens, dtype, draw):
    x, weight = draw(tokens, 72, dtype=dtype) * 3, draw(72, dtype=dtype)
    ops = cpu.OPERATIONS
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_survives_squares_beyond_half_precision(draw):
    x, weight = draw(3, 64, dtype=torch.float16) * 3000, draw(64, dtype=torch.float16)
    for ops in (cpu, reference):
        assert ops.rms_norm(x, weight, 1e-6).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine, dtype, draw):
    x = draw(3, 72, dtype=dtype) * 3 + 1
    weight, bias = draw(2, 72, dtype=dtype) if affine else (None, None)
    exact = (x.double() - x.double().mean(-1, keepdim=True)).div(x.double().std(-1, False, True))
    if affine:
        exact = exact * weight.double() + bias.double()
    for ops in (reference.OPERATIONS, cpu.OPERATIONS):
        got = ops.layer_norm(x, weight, bias, 1e-9)
        assert got.dtype == dtype
        torch.testing.assert_close(got, exact.to(dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_adding_product_changes_the_residual_in_place(ops, bias, draw):
    x, weight, residual = draw(5, 24), draw(32, 24), draw(5, 32)
    offset = draw(32) if bias else None
    total = residual + torch.nn.functional.linear(x, weight, offset)
    assert ops.OPERATIONS.prepare_add_linear(weight, offset)(x, residual) is None
    torch.testing.assert_close(residual, total)


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("activation", [None, *Activation])
def test_a_product_of_the_normed_residual(ops, activation, draw):
    x, weight, offset = draw(5, 24), draw(32, 24), draw(32)
    norm = RowNorm(draw(24), 1e-6)
    before = x.clone()
    product = ops.OPERATIONS.prepare_norm_linear(weight, offset, norm, activation)
    expected = torch.nn.functional.linear(reference.rms_norm(x, *norm), weight, offset)
    if activation is not None:
        expected = reference.act_mul(expected, activation)
    torch.testing.assert_close(product(x), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gated_unit(activation, tokens, dtype, draw):
    gate_up = draw(tokens, 2 * 40, dtype=dtype)
    expected = reference.act_mul(gate_up.clone(), activation)
    ops = cpu.OPERATIONS
    torch.testing.assert_close(ops.act_mul(gate_up.clone(), activation), expected)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_is_rounded_before_its_weight_unless_that_is_wider(weight_dtype, draw):
    x, weight = draw(200, 72, dtype=torch.bfloat16), draw(72, dtype=weight_dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    got = cpu.OPERATIONS.rms_norm(x, weight, 1e-5)
    assert (got == expected).float().mean() > 0.99


def test_the_compiled_gate_at_its_extremes():
    gates = torch.tensor([[0.0, -200.0, 200.0, -90.0, float("nan"), float("inf")]])
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    expected = reference.act_mul(gate_up.clone(), Activation.SILU)
    got = cpu.OPERATIONS.act_mul(gate_up.clone(), Activation.SILU)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("activation", Activation)
def test_gates_that_are_no_numbers_stay_that(activation):
    nan = float("nan")
    ops = cpu.OPERATIONS
    assert ops.act_mul(torch.tensor([[nan, 1.0, 1.0, nan]]), activation).isnan().all()


def form(name, dtype):
    """A form of products with a weight, by name; skips where this processor has none of it."""
    if name == "panels":
        has_it, prepare = compiled_tiles.available(), Panels
    elif name == "oneDNN":
        has_it, prepare = can_lay_out(dtype), laid_out
    else:
        has_it, prepare = True, cpu.prepare_linear
    if not has_it:
        pytest.skip(f"no products of {dtype} with {name} here")
    return prepare


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 5, 33, 130])
@pytest.mark.parametrize("name", ["chosen", "panels", "oneDNN"])
def test_products(name, tokens, bias, dtype, draw):
    """Of each form, two panels that share outputs among them."""
    x, weight = draw(tokens, 48, dtype=dtype), draw(56, 48, dtype=dtype)
    offset = draw(56, dtype=dtype) if bias else None
    got = form(name, dtype)(weight, offset)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, reference.prepare_linear(weight, offset)(x), rtol=2e-2, atol=2e-2
    )
    assert got.shape == (tokens, 56)
    if dtype == torch.float32:
        exact = torch.nn.functional.linear(x.double(), weight.double())
        exact += 0 if offset is None else offset
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 7, 70])
@pytest.mark.parametrize("shape", [(96, 40), (200, 700)], ids=str)
def test_products_with_norm_gate_and_sum(shape, tokens, dtype, draw):
    """As the reference makes them one after the other; the gate's halves share outputs, too."""
    x, weight, bias = draw(tokens, shape[1], dtype=dtype), draw(*shape, dtype=dtype), draw(shape[0])
    weight, bias = weight / 8, bias.to(dtype)
    norm = RowNorm(draw(shape[1], dtype=dtype), 1e-6)
    near = {"rtol": 3e-2, "atol": 6e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
    for activation in (None, Activation.SILU, Activation.RELU):
        made = [
            ops.prepare_norm_linear(weight, bias, norm, activation)(x.clone())
            for ops in (reference.OPERATIONS, cpu.OPERATIONS)
        ]
        torch.testing.assert_close(made[1], made[0], **near)
    streams = [draw(tokens, shape[0], dtype=dtype)] * 2
    streams[1] = streams[0].clone()
    for ops, stream in zip((reference.OPERATIONS, cpu.OPERATIONS), streams, strict=True):
        ops.prepare_add_linear(weight, bias)(x, stream)
    torch.testing.assert_close(streams[1], streams[0], **near)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_product_with_panels_does_not_depend_on_those_beside_it(dtype, draw):
    if not compiled_tiles.available():
        pytest.skip("no panels here")
    x, weight = draw(70, 600, dtype=dtype), draw(200, 600, dtype=dtype)
    norm = RowNorm(draw(600, dtype=dtype), 1e-6)
    for ending in Ending:
        product = Panels(weight, None, ending, norm)
        together = torch.zeros(70, 100 if ending is Ending.GATED else 200, dtype=dtype)
        product.into(x, together)
        for rows in (1, 2, 3, 5, 6, 7, 8, 13, 69):
            few = torch.zeros_like(together[:rows])
            product.into(x[-rows:], few)
            assert torch.equal(few, together[-rows:])


@pytest.mark.parametrize("dtype", BY_KIND, ids=str)
def test_weights_of_16_bits_make_the_same_products_as_in_float32(dtype, draw):
    if not compiled_tiles.available():
        pytest.skip("no panels here")
    x, weight = draw(270, 300), draw(200, 300).to(dtype)
    for ending, norm in itertools.product(Ending, (None, RowNorm(draw(300), 1e-6))):
        narrow, wide = (
            Panels(each, None, ending, norm) for each in (NarrowWeight(weight), weight.float())
        )
        for rows in (*range(1, 71), 270):
            streams = torch.ones(2, rows, 100 if ending is Ending.GATED else 200)
            narrow.into(x[:rows], streams[0])
            wide.into(x[:rows], streams[1])
            assert torch.equal(*streams), (ending, rows)


def test_rows_of_a_table_of_16_bits_are_float32_where_that_is_asked_for(draw):
    tokens = torch.tensor([3, 0, 9])
    for dtype in (torch.bfloat16, torch.float16):
        table = draw(10, 40).to(dtype)
        for ops in (cpu.OPERATIONS, reference.OPERATIONS):
            assert torch.equal(ops.embed(table, tokens, None, torch.float32), table[tokens].float())


def test_panels_add_each_output_once_with_two_threads(draw):
    if not compiled_tiles.available():
        pytest.skip("no panels here")
    x, weight = draw(40, 64), draw(250, 64)
    expected = x @ weight.t() + 1
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        product = Panels(weight, None, Ending.ADDED)
        for _ in range(20):
            stream = torch.ones(40, 250)
            product.into(x, stream)
            torch.testing.assert_close(stream, expected, rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_panels_keep_numbers_that_are_none(draw):
    if not compiled_tiles.available():
        pytest.skip("no panels here")
    for dtype in DTYPES:
        x, weight = torch.ones(3, 2, dtype=dtype), torch.ones(48, 2, dtype=dtype)
        x[1, 0], x[2, 0] = float("nan"), float("inf")
        got = Panels(weight, None)(x)
        assert (got[0] == 2).all()
        assert got[1].isnan().all()
        assert got[2].isinf().all()


def test_products_of_any_number_of_rows_are_of_few_kinds():
    """oneDNN keeps code and scratch memory for each kind: a thousand kinds are gigabytes."""
    numbers = [filled_rows(rows) for rows in range(1, 4097)]
    assert len(set(numbers)) < 150
    assert all(filled == rows for rows, filled in enumerate(numbers[:32], 1))
    assert all(rows <= filled <= rows * 17 / 16 for rows, filled in enumerate(numbers, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("slots", "value_dim"),
    [([7], 16), ([3, 4, 5], 6), ([9, 2, 6], 40)],
    ids=["one", "run", "apart"],
)
def test_rotation_and_the_write_to_the_pool(slots, value_dim, normed, dtype, draw):
    heads, kv_heads, head_dim = 6, 2, 16
    width = (heads + kv_heads) * head_dim + kv_heads * value_dim
    qkv = draw(len(slots), width, dtype=dtype)
    norm = HeadNorm(draw(16, dtype=dtype), draw(16, dtype=dtype), 1e-6) if normed else None
    positions = torch.arange(len(slots)) * 1000 + 5
    frequencies = 1 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    outcomes = []
    for ops in (reference, cpu.OPERATIONS):
        keys = torch.zeros(12, kv_heads, head_dim, dtype=dtype)
        values = torch.zeros(12, kv_heads, value_dim, dtype=dtype)
        rotation = ops.rotate(positions, frequencies, 1.3, dtype)
        q = ops.store_key_value(qkv.clone(), rotation, norm, keys, values, torch.tensor(slots))
        assert q.shape == (len(slots), heads, head_dim)
        untouched = [slot for slot in range(12) if slot not in slots]
        assert not keys[untouched].any()
        assert not values[untouched].any()
        outcomes.append((q, keys, values))
    for outcome in outcomes[1:]:
        for expected, got in zip(outcomes[0], outcome, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)


def int8_pool(kv_heads=2, head_dim=16):
    return KVPool(
        slots=11,
        layouts=[alike(kv_heads, head_dim)],
        dtype=torch.int8,
        device=torch.device("cpu"),
    )


# A loop is compiled for each type.
@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_write_to_a_pool_of_int8(normed, dtype, draw):
    """What a plain pool would hold, to the nearest 127th of each head's largest number."""
    qkv, slots = draw(3, 10 * 16, dtype=dtype), torch.tensor([9, 2, 6])
    qkv[1] *= 1000
    qkv[2, 8 * 16 : 9 * 16] = 0  # a value
    norm = HeadNorm(draw(16, dtype=dtype), draw(16, dtype=dtype), 1e-6) if normed else None
    frequencies = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    for ops in (reference, cpu.OPERATIONS):
        plain = [torch.zeros(12, 2, 16, dtype=dtype) for _ in range(2)]
        rotation = ops.rotate(torch.arange(3) * 1000, frequencies, 1.3, dtype)
        q = ops.store_key_value(qkv.clone(), rotation, norm, *plain, slots)
        pool = int8_pool()
        pools, scales = (pool.keys[0], pool.values[0]), pool.scales[0]
        got = ops.store_key_value(qkv.clone(), rotation, norm, *pools, slots, scales)
        assert torch.equal(got, q)
        for numbers, scale, held in zip(pools, scales, plain, strict=True):
            wide = held[slots].float()
            torch.testing.assert_close(scale[slots], wide.abs().amax(-1) / 127)
            error = (numbers[slots] * scale[slots][..., None] - wide).abs()
            assert (error <= scale[slots][..., None] * 0.501).all()
            untouched = [slot for slot in range(12) if slot not in slots]
            assert not numbers[untouched].any()
            assert not scale[untouched].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_shows_in_a_pool_of_int8(bad, draw):
    qkv = draw(2, 4 * 16)
    qkv[0, 3 * 16 + 5] = bad  # of a value
    rotation = reference.rotate(torch.arange(2), torch.zeros(8), 1.0, torch.float32)
    for ops in (reference, cpu.OPERATIONS):
        pool = int8_pool(kv_heads=1)
        numbers, scales = pool.values[0], pool.scales[0]
        slots = torch.tensor([1, 2])
        ops.store_key_value(qkv.clone(), rotation, None, pool.keys[0], numbers, slots, scales)
        read = numbers[1:3] * scales.values[1:3][..., None]
        assert read.isfinite().flatten(1).any(1).tolist() == [False, True]
        assert scales.keys[1:3].isfinite().all()


def test_rotation_turns_pairs_half_a_head_apart():
    """One quarter turn takes (x, y) to (-y, x); position 0 turns nothing."""
    quarter = torch.tensor([torch.pi / 2])
    for ops in (reference, cpu.OPERATIONS):
        keys, values = torch.zeros(3, 1, 2), torch.zeros(3, 1, 2)
        qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 2)
        rotation = ops.rotate(torch.tensor([0, 1]), quarter, 1.0, torch.float32)
        q = ops.store_key_value(qkv, rotation, None, keys, values, torch.tensor([0, 1]))
        torch.testing.assert_close(q[:, 0], torch.tensor([[1.0, 2.0], [-2.0, 1.0]]))
        torch.testing.assert_close(keys[:2, 0], torch.tensor([[3.0, 4.0], [-4.0, 3.0]]))
        torch.testing.assert_close(values[:2, 0], torch.tensor([[5.0, 6.0], [5.0, 6.0]]))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", [1, 33])
def test_a_product_with_its_activation_is_both(activation, rows):
    generator = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*n, generator=generator) for n in ((rows, 24), (40, 24), (40,)))
    fused = prepare_activated_linear(weight, bias, activation)
    known = (Activation.SILU, Activation.GELU, Activation.GELU_TANH, Activation.RELU)
    assert (fused is None) == (activation not in known)
    if fused is not None:
        expected = reference.OPERATIONS.activate(
            torch.nn.functional.linear(x, weight, bias), activation
        )
        torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-5)
