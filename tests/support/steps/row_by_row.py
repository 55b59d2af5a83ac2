"""The reference operations, every token by itself: what else is in a step changes no bit.

A product of several rows may round otherwise than a product of one, and so may attention and
whatever a processor computes in vectors over the tokens of a step. So products, angles and
attention take one token at a time; the rest goes number by number, or sums within a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tokenpod.kernels.attention.reference_attention import attend
from tokenpod.kernels.backends import reference
from tokenpod.kernels.cache.reference_rotary import CosSin
from tokenpod.kernels.operations.attention_ops import NO_OPTIONS
from tokenpod.kernels.operations.compose import add_linear_of, norm_linear_of
from tokenpod.models.decoders.decoder import Decoder


def _prepare_linear(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """See `ops.PrepareLinear`."""
    product = reference.OPERATIONS.prepare_linear(weight, bias)
    return lambda x: torch.cat([product(row) for row in x.split(1)])


def _rotate(t_position, *frequencies):
    """See `ops.Rotate`."""
    turns = [reference.OPERATIONS.rotate(at, *frequencies) for at in t_position.split(1)]
    return CosSin(torch.cat([turn.cos for turn in turns]), torch.cat([turn.sin for turn in turns]))


def _attention(q, keys, values, plan, options=NO_OPTIONS, scales=None):
    """See `ops.Attend`: by `b_runs` as a CPU's executor gives them."""
    assert scales is None
    batch, out = plan.batch, []
    for row, context in enumerate(batch.b_context):
        slots = torch.cat([torch.arange(first, end) for first, end in batch.b_runs[row]])
        k, v = keys[slots[:context]], values[slots[:context]]
        first, end = batch.b_start[row], batch.b_start[row + 1]
        for at in range(first, end):
            seen = context - (end - 1 - at)
            out.append(attend(q[at : at + 1], k[:seen], v[:seen], plan.window, options))
    return torch.cat(out).flatten(1)


OPERATIONS = replace(
    reference.OPERATIONS,
    rotate=_rotate,
    attention=_attention,
    prepare_linear=_prepare_linear,
    prepare_norm_linear=norm_linear_of(
        _prepare_linear, reference.OPERATIONS.rms_norm, reference.OPERATIONS.act_mul
    ),
    prepare_add_linear=add_linear_of(_prepare_linear),
)


def shallow(decoder: Decoder, layers: int = 2) -> Decoder:
    """Its first layers alone: what comes of the order of steps does not hang on their number."""
    decoder._layers = decoder._layers[:layers]
    return decoder
