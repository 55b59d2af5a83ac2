"""Rows whose tokens see each other, and attention over them compared with its definition."""

from __future__ import annotations

from dataclasses import replace

import torch

from support.kernels.attention_steps import Spec, assert_close, draw_inputs, lay_out
from tokenpod.kernels.backends import reference
from tokenpod.kernels.operations.attention_ops import NO_OPTIONS, AttentionOptions

HEADS = 4


def options_of(name: str, device: torch.device) -> AttentionOptions:
    generator = torch.Generator().manual_seed(5)
    if name == "alibi":
        return AttentionOptions(alibi_slopes=torch.rand(HEADS, generator=generator).to(device))
    return NO_OPTIONS


def agree_where_some_see_each_other(ops, device, window, piece, options, dtype=torch.float32):
    """Rows of images beside others, all behind a prefix; the first rows have one token."""
    specs = [
        Spec(n, n + before, piece=piece) for n, before in ((1, 40), (20, 0), (7, 90), (25, 61))
    ]
    step = lay_out([*specs, Spec(30, 70, piece=piece)], device)
    batch = replace(step.batch, b_mutual=[False, True, False, True, False])
    inputs = draw_inputs(step, HEADS, 2, 64, dtype, device)
    wide = inputs.q.double(), inputs.keys.double(), inputs.values.double()
    exact = reference.attention(*wide, reference.plan_attention(batch, window), options)
    plan = ops.plan_attention(batch, window)
    got = ops.attention(inputs.q, inputs.keys, inputs.values, plan, options)
    assert_close(got, exact, dtype)
    plain = reference.attention(*wide, reference.plan_attention(step.batch, window), options)
    differs = (plain != exact).any(1)
    assert differs[1:20].all()
    assert not differs[[0, *range(21, 28), *range(53, 83)]].any()
