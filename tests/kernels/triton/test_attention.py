"""Attention by Triton kernels equals attention as its definition says, in float64.

The small grid runs everywhere; `test_attention_gpu` has the large one. In every case NaN fills the
slots that no row names and the memory that outputs and scratch are made of, so whatever reads or
leaves it shows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.attention_steps import Spec, agree, assert_close, draw_inputs, lay_out, truth
from tokenpod.kernels.attention import attention_decode
from tokenpod.kernels.attention.attention_extend import extend
from tokenpod.kernels.attention.attention_plan import list_tiles, queries_per_tile
from tokenpod.kernels.attention.attention_tiles import DecodeTile, ExtendTile
from tokenpod.kernels.attention.triton_attention import attention, plan_attention
from tokenpod.kernels.operations.attention_ops import AttentionOptions

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PADDING = Spec(1, 0)

DECODES = [Spec(1, 1), Spec(1, 17), PADDING, Spec(1, 130, piece=7), Spec(1, 64), Spec(1, 63, 1)]
EXTENDS = [
    Spec(2, 2),
    Spec(33, 33),
    Spec(5, 90),
    Spec(40, 71, piece=6),
    Spec(3, 129, piece=64),
    Spec(70, 70),
]


@pytest.mark.sampled(4, "gpu")
@pytest.mark.parametrize("window", [None, 1, 16, 50, 1000])
@pytest.mark.parametrize("specs", [DECODES, EXTENDS, DECODES[1:5] + EXTENDS[2:5]], ids=len)
def test_every_kind_of_step_under_every_window(specs, window, device):
    agree(lay_out(specs, device), device, window=window)


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1), (14, 2), (16, 1)], ids=str)
def test_every_grouping_of_heads(heads, device):
    agree(lay_out(DECODES[1:5] + EXTENDS[2:4], device), device, heads=heads)


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_head_size_and_type(head_dim, dtype, device):
    specs = [DECODES[1], DECODES[3], EXTENDS[2], EXTENDS[3]]
    agree(lay_out(specs, device), device, heads=(2, 1), head_dim=head_dim, dtype=dtype)


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize(
    ("splits", "block", "window"),
    [(1, 64, None), (2, 64, 40), (3, 16, None), (40, 16, 40), (20, 64, None)],
)
def test_any_number_of_shares_gives_the_same_result(splits, block, window, device):
    """More splits than a row has blocks, than are merged at a time, and just one."""
    step = lay_out(DECODES, device)
    inputs = draw_inputs(step, 2, 1, 64, torch.float32, device)
    out = torch.empty(step.batch.tokens, 128, device=device)
    attention_decode.decode(
        inputs.q,
        inputs.keys,
        inputs.values,
        out,
        step.batch.row_table,
        step.batch.paged,
        len(DECODES),
        window,
        DecodeTile(block=block, warps=4, stages=2, programs=1),
        splits,
    )
    assert_close(out, truth(inputs, step.batch, window), torch.float32)


@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (80, 16)])
def test_values_in_parts_give_the_same_result(head_dim, window, device):
    """Two programs make a tile's result, of heads that fill their block and of others."""
    step, tile = lay_out(EXTENDS[2:5], device), ExtendTile(16, 16, 4, 2, parts=2)
    inputs = draw_inputs(step, 4, 2, head_dim, torch.float32, device)
    out = torch.empty(step.batch.tokens, 4 * head_dim, device=device)
    tiles = list_tiles(step.batch, window, queries_per_tile(4, 2, tile))
    table = step.batch.row_table
    extend(inputs.q, inputs.keys, inputs.values, out, table, tiles, window, tile)
    assert_close(out, truth(inputs, step.batch, window), torch.float32)


def test_a_padding_row_gives_zeros(device):
    step = lay_out([PADDING, Spec(1, 9), PADDING], device)
    inputs = draw_inputs(step, 4, 2, 64, torch.float32, device)
    out = attention(inputs.q, inputs.keys, inputs.values, plan_attention(step.batch, None))
    assert out[0].eq(0).all()
    assert out[2].eq(0).all()
    assert out[1].ne(0).all()


def test_contexts_are_read_on_the_device(device):
    """As a graph captured once needs it: the host's lists are of another step."""
    step = lay_out([Spec(1, 9), Spec(1, 40), Spec(1, 200)], device)
    stale = replace(step.batch, b_context=[1] * 3, b_runs=[[(0, 1)]] * 3, b_row=[0] * 3)
    inputs = draw_inputs(step, 4, 2, 64, torch.float32, device)
    out = attention(inputs.q, inputs.keys, inputs.values, plan_attention(stale, None))
    assert_close(out, truth(inputs, step.batch, None), torch.float32)


def test_queries_that_are_a_slice_of_more_heads(device):
    """As they come from the fused product."""
    step = lay_out(DECODES[:3] + EXTENDS[:3], device)
    inputs = draw_inputs(step, 6, 2, 64, torch.float32, device)
    plan = plan_attention(step.batch, None)
    sliced = attention(inputs.q[:, :4], inputs.keys, inputs.values, plan)
    whole = attention(inputs.q[:, :4].contiguous(), inputs.keys, inputs.values, plan)
    assert torch.equal(sliced, whole)


def test_not_a_number_stays_in_its_row(device):
    """The engine fails a row whose results are not numbers, and must see it."""
    specs = [Spec(1, 30), Spec(1, 150), Spec(4, 20), Spec(20, 40)]
    step = lay_out(specs, device)
    inputs = draw_inputs(step, 4, 2, 64, torch.float32, device)
    plan = plan_attention(step.batch, None)
    clean = attention(inputs.q, inputs.keys, inputs.values, plan)
    for bad in (1, 3):
        inputs.values[step.batch.b_runs[bad][0][0]] = float("nan")
    out = attention(inputs.q, inputs.keys, inputs.values, plan)
    for row in range(len(specs)):
        tokens = slice(step.batch.b_start[row], step.batch.b_start[row + 1])
        if row in (1, 3):
            assert out[tokens].isnan().all()
        else:
            assert torch.equal(out[tokens], clean[tokens])


def _options(heads, device):
    generator = torch.Generator(device).manual_seed(4)
    slopes = torch.rand(heads, generator=generator, device=device) * 0.2
    sinks = torch.randn(heads, generator=generator, device=device) + 1
    return {
        "scale": AttentionOptions(scale=0.3),
        "softcap": AttentionOptions(softcap=1.5),
        "alibi": AttentionOptions(alibi_slopes=slopes),
        "sinks": AttentionOptions(sinks=sinks),
        "all": AttentionOptions(scale=0.3, softcap=1.5, alibi_slopes=slopes, sinks=sinks),
    }


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize("name", ["scale", "softcap", "alibi", "sinks", "all"])
@pytest.mark.parametrize("window", [None, 20])
def test_every_option(name, window, device):
    step = lay_out(DECODES + EXTENDS, device)
    agree(step, device, heads=(6, 2), window=window, options=_options(6, device)[name])


@pytest.mark.parametrize("heads", [(71, 1), (40, 2)], ids=str)
def test_many_heads_that_share_keys(heads, device):
    step = lay_out([Spec(1, 70), Spec(1, 3), Spec(5, 40), Spec(3, 9, piece=2)], device)
    agree(step, device, heads=heads, window=30)


def test_a_batch_without_rows_on_the_device_is_refused(device):
    step = lay_out(DECODES, device)
    with pytest.raises(ValueError, match="6 rows has no paged rows"):
        plan_attention(replace(step.batch, paged=None), None)


@pytest.mark.parametrize(
    ("heads", "head_dim", "message"),
    [((2, 1), 640, "heads of size 640: at most 512"), ((129, 1), 64, "129 query heads share 1")],
)
def test_heads_beyond_the_limits_are_refused(heads, head_dim, message, device):
    step = lay_out([Spec(1, 2)], device)
    inputs = draw_inputs(step, *heads, head_dim, torch.float32, device)
    with pytest.raises(ValueError, match=message):
        attention(inputs.q, inputs.keys, inputs.values, plan_attention(step.batch, None))
