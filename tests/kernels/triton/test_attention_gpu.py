"""The large grid: long contexts and large batches, compiled."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from support.kernels.attention_steps import Spec, agree, assert_close, draw_inputs, lay_out, truth
from tokenpod.kernels.attention.attention_tiles import TILES
from tokenpod.kernels.attention.triton_attention import attention, plan_attention
from tokenpod.kernels.operations.attention_ops import AttentionOptions

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

LONG = [Spec(1, 32_768), Spec(1, 32_767, 64), Spec(1, 5), Spec(256, 32_768), Spec(2, 20_001, 48)]
MANY = [Spec(1, 1 + 37 * i % 3000, piece=None if i % 2 else 16) for i in range(256)]
PROMPTS = [Spec(1, 1500), Spec(300, 700), Spec(1024, 1024), Spec(130, 2000, piece=33)]


@pytest.mark.parametrize("scaled", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("specs", [LONG, MANY, PROMPTS], ids=["long", "many", "prompts"])
def test_long_contexts_and_large_batches(specs, window, dtype, scaled, device):
    step = lay_out(specs, device)
    shape = {"heads": (8, 2), "head_dim": 128, "dtype": dtype}
    agree(step, device, **shape, window=window, scaled=scaled)


#: Each pair is compiled anew: all groups with one size of heads, some with the others.
GROUPS_AND_SIZES = [
    *((group, 128) for group in range(1, 17)),
    *itertools.product([1, 3, 8, 16], [64, 80, 96, 192, 256, 320, 512]),
    # Gemma 4: 8 and 16 heads to one of 512, or 4.
    *itertools.product([2, 4, 32], [512]),
]


@pytest.mark.parametrize("scaled", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize(("group", "head_dim"), GROUPS_AND_SIZES)
def test_every_group_and_every_head_size(group, head_dim, scaled, device):
    step = lay_out(PROMPTS, device)
    shape = {"heads": (2 * group, 2), "head_dim": head_dim, "dtype": torch.bfloat16}
    agree(step, device, **shape, scaled=scaled)


@pytest.mark.parametrize("scaled", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("which", "head_dim"),
    [
        *(("softcap", 64), ("alibi_slopes", 128), ("sinks", 80)),
        *(("all", 64), ("all", 256), ("all", 512)),
    ],
)
def test_every_option_of_every_head_size(which, window, head_dim, scaled, device):
    generator = torch.Generator(device).manual_seed(6)
    given = {
        "softcap": 1.5,
        "alibi_slopes": torch.rand(8, generator=generator, device=device) * 0.1,
        "sinks": torch.randn(8, generator=generator, device=device) + 1,
    }
    options = AttentionOptions(**(given if which == "all" else {which: given[which]}))
    step = lay_out(PROMPTS, device)
    shape = {"heads": (8, 2), "head_dim": head_dim, "dtype": torch.bfloat16}
    agree(step, device, **shape, window=window, options=options, scaled=scaled)


@pytest.mark.parametrize("scaled", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("rows", [3, 60, 200, 500])
def test_every_number_of_rows_has_a_tile_that_fits(rows, head_dim, scaled, device):
    step = lay_out([Spec(1, 130 + row) for row in range(rows)], device)
    shape = {"heads": (8, 2), "head_dim": head_dim, "dtype": torch.bfloat16}
    agree(step, device, **shape, scaled=scaled)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_captured_graph_follows_growing_contexts(rows, device):
    """Its plan was made of one token per row; the device's rows change under it."""
    grown = lay_out([Spec(1, 200 + 91 * row, piece=50) for row in range(rows)], device)
    inputs = draw_inputs(grown, 8, 2, 128, torch.bfloat16, device)
    paged = grown.batch.paged
    contexts = paged.b_context.clone()
    paged.b_context.fill_(1)
    attention(inputs.q, inputs.keys, inputs.values, plan_attention(grown.batch, None))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(inputs.q, inputs.keys, inputs.values, plan_attention(grown.batch, None))
    paged.b_context.copy_(contexts)
    graph.replay()
    assert_close(out, truth(inputs, grown.batch, None), torch.bfloat16)


@pytest.mark.parametrize("size", TILES, ids=str)
def test_tiles_of_every_size_fit(size, device):
    head_dim, bytes_of_a_number = size
    dtype = torch.bfloat16 if bytes_of_a_number == 2 else torch.float32
    for window in (None, 100):
        agree(lay_out(PROMPTS, device), device, head_dim=head_dim, window=window, dtype=dtype)


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_asking_ahead_changes_nothing(blocks, head_dim, device, monkeypatch):
    for size, tiles in TILES.items():
        asked = tuple((most, replace(tile, ahead=blocks)) for most, tile in tiles.decode)
        asking = replace(tiles, decode=asked)
        monkeypatch.setitem(TILES, size, asking)
    for specs in (LONG, MANY):
        step = lay_out(specs, device)
        agree(step, device, heads=(8, 2), head_dim=head_dim, window=100, dtype=torch.bfloat16)
