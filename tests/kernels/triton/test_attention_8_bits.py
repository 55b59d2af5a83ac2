"""Attention over a pool of 8 bits equals attention over the numbers that those stand for."""

from __future__ import annotations

import pytest
import torch

from support.kernels.attention_steps import Spec, agree, lay_out
from tokenpod.kernels.operations.attention_ops import AttentionOptions

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DECODES = [Spec(1, 1), Spec(1, 17), Spec(1, 0), Spec(1, 130, piece=7), Spec(1, 64)]
EXTENDS = [Spec(2, 2), Spec(33, 33), Spec(5, 90), Spec(40, 71, piece=6)]


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("specs", [DECODES, EXTENDS, DECODES[1:4] + EXTENDS[1:3]], ids=len)
def test_every_kind_of_step(specs, window, device):
    agree(lay_out(specs, device), device, window=window, scaled=True)


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_head_size_and_type_of_queries(head_dim, dtype, device):
    step = lay_out([DECODES[1], DECODES[3], EXTENDS[2], EXTENDS[3]], device)
    agree(step, device, heads=(2, 1), head_dim=head_dim, dtype=dtype, scaled=True)


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (14, 2), (16, 1)], ids=str)
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.gpu), 20])
def test_with_every_option_and_grouping_of_heads(heads, window, device):
    generator = torch.Generator(device).manual_seed(4)
    options = AttentionOptions(
        softcap=1.5,
        alibi_slopes=torch.rand(heads[0], generator=generator, device=device) * 0.2,
        sinks=torch.randn(heads[0], generator=generator, device=device) + 1,
    )
    step = lay_out(DECODES[1:] + EXTENDS[1:], device)
    agree(step, device, heads=heads, window=window, options=options, scaled=True)
