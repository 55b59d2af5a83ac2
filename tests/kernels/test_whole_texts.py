"""Attention of texts that a step reads as a whole: each token sees those behind it, too."""

from __future__ import annotations

import pytest
import torch

from support.kernels.attention_steps import Spec, lay_out
from support.kernels.whole_texts import agree, inputs, options_of
from tokenpod.kernels.attention.text_tiles import CapturedTexts, cut_texts
from tokenpod.kernels.backends import cpu, reference
from tokenpod.kernels.operations.batch import RaggedRows

CPU = torch.device("cpu")


@pytest.mark.parametrize("apart", [False, True], ids=["one product", "apart"])
@pytest.mark.parametrize("window", [None, 1, 9, 200])
@pytest.mark.parametrize("options", ["plain", "distance"])
def test_loops_do_what_the_definition_says(options, window, apart):
    agree(cpu.OPERATIONS, CPU, options_of(options, window, 4, CPU), apart=apart)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],  # a loop each
    ids=str,
)
@pytest.mark.parametrize("shape", [(4, 4, 32), (3, 1, 80), (2, 2, 6)], ids=str)
def test_loops_take_heads_of_any_size_and_shorter_numbers(shape, dtype):
    agree(cpu.OPERATIONS, CPU, options_of("plain", None, shape[0], CPU), shape=shape, dtype=dtype)


def test_a_token_sees_the_one_behind_it():
    """The definition itself: with one value that is not zero, all of its text have a part of it."""
    step = lay_out([Spec(3, 3), Spec(2, 2)], CPU)
    q, keys, values = inputs(5, 1, 1, 64, torch.float32, CPU)
    values[:] = 0
    values[2] = 1
    out = reference.attend_texts(q, keys, values, reference.plan_texts(step.batch))
    assert (out[:, 0] > 0).tolist() == [True, True, True, False, False]


def test_tiles_are_those_of_the_longest_texts_first():
    assert cut_texts([0, 3, 8, 9], 2).tolist() == [
        *([3, 2, 3, 8], [5, 2, 3, 8], [7, 1, 3, 8]),
        *([0, 2, 0, 3], [2, 1, 0, 3]),
        [8, 1, 8, 9],
    ]


@pytest.mark.parametrize("lengths", [[1] * 9, [40], [1, 39], [17, 1, 1, 1, 20], [3, 2]], ids=str)
def test_a_captured_step_has_room_for_any_texts(lengths):
    tiles = CapturedTexts((4, 16), rows=9)
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    numbers = torch.full((tiles.count(40),), 7, dtype=torch.int32)
    rows = RaggedRows(starts, lengths, [[]] * len(lengths), [0] * len(lengths), 0)
    assert tiles.fill(rows, numbers.numpy())
    for queries in (4, 16):
        found, expected = tiles.by_kind(numbers)[None, queries], cut_texts(starts, queries)
        assert found[: len(expected)].tolist() == expected.tolist()
        assert not found[len(expected) :].any()
