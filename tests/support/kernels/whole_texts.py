"""Steps of texts that are read as a whole, and attention over them compared with its definition."""

from __future__ import annotations

import torch

from support.kernels.attention_steps import Spec, assert_close, lay_out
from tokenpod.kernels.backends import reference
from tokenpod.kernels.operations.attention_ops import TextOptions

LENGTHS = (1, 1, 2, 17, 130, 300)


def inputs(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    apart: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values: parts of one product, or `apart`."""
    generator = torch.Generator().manual_seed(3)
    sizes = [count * head_dim for count in (heads, kv_heads, kv_heads)]
    drawn = torch.randn(tokens, sum(sizes), generator=generator).to(device, dtype)
    parts = drawn.split(sizes, 1)
    if apart:
        parts = tuple(part.contiguous() for part in parts)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in parts)
    return q, k, v


def options_of(name: str, window: int | None, heads: int, device: torch.device) -> TextOptions:
    """Plain, or with numbers by distance."""
    if name == "plain":
        return TextOptions(window=window)
    table = torch.randn(heads, 2 * 20 + 1, generator=torch.Generator().manual_seed(5))
    return TextOptions(scale=0.2, window=window, distance_bias=table.to(device))


def agree(
    ops,
    device,
    options,
    *,
    lengths=LENGTHS,
    shape=(4, 2, 64),
    dtype=torch.float32,
    apart=False,
    padding=3,
):
    """Texts of these lengths; behind them tokens of none, which are not numbers."""
    step = lay_out([Spec(n, n) for n in lengths], device)
    tokens = step.batch.tokens
    q, k, v = inputs(tokens + padding, *shape, dtype, device, apart=apart)
    for x in (q, k, v):
        x[tokens:] = float("nan")
    plan = reference.plan_texts(step.batch)
    exact = reference.attend_texts(q.double(), k.double(), v.double(), plan, options)
    got = ops.attend_texts(q, k, v, ops.plan_texts(step.batch), options)
    assert_close(got[:tokens], exact[:tokens], dtype)
