"""Attention of texts that are read as a whole: each token sees those behind it, too."""

from __future__ import annotations

import pytest
import torch

from support.kernels.attention_steps import Spec, draw_inputs, lay_out
from support.kernels.whole_rows import agree, agree_where_some_see_each_other, options_of
from tokenpod.kernels.backends import cpu, reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("piece", [None, 7], ids=["one-run", "pieces"])
@pytest.mark.parametrize("window", [None, 1, 9, 200])
@pytest.mark.parametrize("options", ["plain", "distance", "alibi"])
def test_loops_do_what_the_definition_says(options, window, piece):
    agree(cpu.OPERATIONS, CPU, window, piece, options_of(options, CPU))


@pytest.mark.parametrize("piece", [None, 7], ids=["one-run", "pieces"])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("options", ["plain", "alibi"])
def test_rows_of_images_see_each_other_beside_others(options, window, piece):
    options = options_of(options, CPU)
    agree_where_some_see_each_other(cpu.OPERATIONS, CPU, window, piece, options)


def test_a_token_sees_the_one_behind_it():
    """The definition itself: with one value that is not zero, all of its row have a part of it."""
    step = lay_out([Spec(3, 3)], CPU)
    inputs = draw_inputs(step, 1, 1, 64, torch.float32, CPU)
    ((start, end),) = step.batch.b_runs[0]
    inputs.values[start:end] = 0
    inputs.values[end - 1] = 1
    for causal, seen in ((True, [False, False, True]), (False, [True, True, True])):
        plan = reference.plan_attention(step.batch, None, causal=causal)
        out = reference.attention(inputs.q, inputs.keys, inputs.values, plan)
        assert (out[:, 0] > 0).tolist() == seen
