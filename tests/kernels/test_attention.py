"""Attention over runs equals attention as its definition says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from tokenpod.kernels.attention import cpu_attention
from tokenpod.kernels.backends import cpu, reference
from tokenpod.kernels.cache.kv_rounding import quantise_each
from tokenpod.kernels.operations.attention_ops import NO_OPTIONS, AttentionOptions, KVScales

pytestmark = pytest.mark.compute

SLOTS = 700

#: A few units in the last place of results around 1 to 4.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}

#: Tokens of each row in this step, and its runs.
STEPS = {
    "one row of one token": [(1, (1,))],
    "decoding": [(1, (9,)), (1, (64,)), (1, (1,)), (1, (33,))],
    "decoding after shared prefixes": [(1, (8, 5)), (1, (3, 1)), (1, (16, 7, 11)), (1, (21,))],
    "decoding with scattered slots": [(1, (1,) * 17), (1, (2, 1, 3, 1, 1, 4))],
    "whole prompts": [(7, (7,)), (2, (2,)), (31, (31,))],
    "chunks": [(5, (12,)), (2, (40,)), (19, (24,))],
    "chunks after shared prefixes": [(5, (12, 5)), (6, (3, 4, 8)), (4, (8, 4, 2))],
    "own tokens over several runs": [(6, (10, 3, 2)), (9, (4, 5)), (8, (1,) * 11)],
    "mixed": [(1, (13,)), (1, (4, 9)), (3, (3,)), (11, (6, 14)), (2, (1, 1, 1, 1, 1, 1))],
}


@pytest.fixture(params=STEPS, ids=str)
def batch(request, row, step_over):
    return step_over([row(*spec) for spec in STEPS[request.param]], SLOTS)


def agree(
    batch,
    window,
    heads,
    kv_heads,
    head_dim,
    draw,
    dtype=torch.float32,
    options=NO_OPTIONS,
    eight_bits=False,
    value_dim=None,
):
    q = draw(batch.tokens, heads, head_dim, dtype=dtype)
    keys = draw(SLOTS, kv_heads, head_dim, dtype=dtype)
    values = draw(SLOTS, kv_heads, value_dim or head_dim, dtype=dtype)
    used = batch.row_table[batch.row_table >= 0].long()
    unused = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, used, False)
    scales = None
    if eight_bits:
        (keys, key_scale), (values, value_scale) = quantise_each(keys), quantise_each(values)
        scales = KVScales(key_scale, value_scale)
        key_scale[unused] = value_scale[unused] = float("nan")
    else:
        keys[unused] = values[unused] = float("nan")
    expected = reference.attention(
        q, keys, values, reference.plan_attention(batch, window), options, scales
    )
    plan = cpu.plan_attention(batch, window)
    got = cpu.attention(q, keys, values, plan, options, scales)
    assert got.shape == (batch.tokens, heads * (value_dim or head_dim))
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 1, 4, 12, 100])
def test_every_kind_of_step_under_every_window(batch, window, draw):
    agree(batch, window, 4, 2, 64, draw)


# A loop is compiled for each grouping of heads that are as large as a model's.
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        ((1, 1), 8),
        pytest.param((4, 1), 40, marks=pytest.mark.slow),
        *(
            pytest.param((heads, kv_heads), head_dim, marks=pytest.mark.slow)
            for heads, kv_heads in [(1, 1), (6, 6), (6, 1), (12, 4), (5, 5)]
            for head_dim in (16, 64)
        ),
    ],
)
def test_every_grouping_of_heads(heads, head_dim, row, step_over, draw):
    batch = step_over([row(*spec) for spec in STEPS["mixed"]], SLOTS)
    agree(batch, None, *heads, head_dim, draw)


@pytest.mark.sampled(5, "slow")
@pytest.mark.parametrize("value_dim", [32, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, 5])
def test_values_of_another_size_than_keys(batch, window, value_dim, draw):
    agree(batch, window, 2, 2, 40, draw, value_dim=value_dim)
    if window is not None:
        options = AttentionOptions(sinks=draw(4))
        agree(batch, window, 4, 2, 40, draw, value_dim=value_dim, options=options)


@pytest.mark.sampled(5, "slow")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_half_precision(batch, window, dtype, draw):
    agree(batch, window, 4, 2, 64, draw, dtype)


@pytest.mark.sampled(5, "slow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_a_pool_of_int8(batch, window, dtype, draw):
    agree(batch, window, 6, 2, 40, draw, dtype, eight_bits=True, value_dim=32)


def test_options_over_a_pool_of_int8(row, step_over, draw):
    batch = step_over([row(*spec) for spec in STEPS["mixed"]], SLOTS)
    options = AttentionOptions(0.7, 1.5, draw(4).abs(), sinks=draw(4))
    agree(batch, 7, 4, 2, 16, draw, options=options, eight_bits=True)


@pytest.mark.parametrize("window", [None, 5])
def test_scores_are_made_for_some_queries_of_a_row_at_a_time(batch, window, draw, monkeypatch):
    monkeypatch.setattr(cpu_attention, "SCORES_AT_ONCE", 4 * 60)
    agree(batch, window, 4, 2, 16, draw, options=AttentionOptions(softcap=2.0))


@pytest.mark.sampled(7, "slow")
@pytest.mark.parametrize("name", ["scale", "softcap", "alibi", "sinks", "all"])
@pytest.mark.parametrize("window", [None, 5])
def test_every_option(batch, window, name, draw):
    slopes, sinks = draw(4).abs(), draw(4)
    options = {
        "scale": AttentionOptions(scale=0.7),
        "softcap": AttentionOptions(softcap=1.5),
        "alibi": AttentionOptions(alibi_slopes=slopes),
        "sinks": AttentionOptions(sinks=sinks),
        "all": AttentionOptions(0.7, 1.5, slopes, sinks=sinks),
    }[name]
    agree(batch, window, 4, 2, 16, draw, options=options)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=7)),
        min_size=1,
        max_size=5,
    ),
    window=st.one_of(st.none(), st.integers(1, 20)),
)
def test_any_step(rows, window, row, step_over):
    generator = torch.Generator().manual_seed(2)
    specs = [row(min(tokens, sum(runs)), tuple(runs)) for tokens, runs in rows]
    batch = step_over(sorted(specs, key=lambda spec: spec.tokens != 1), SLOTS)
    agree(
        batch,
        window,
        4,
        2,
        8,
        lambda *shape, dtype: torch.randn(shape, generator=generator, dtype=dtype),
    )
