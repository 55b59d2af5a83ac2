"""The kernel of prompts on texts that are read as a whole: each token sees those behind it."""

from __future__ import annotations

import pytest
import torch

from support.kernels.whole_rows import agree, agree_where_some_see_each_other, options_of
from tokenpod.kernels.backends import triton as triton_backend


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Fresh tensors hold NaN: what a kernel does not write shows."""


@pytest.mark.parametrize(
    ("options", "window", "piece"),
    [("plain", None, None), ("plain", 9, 7), ("plain", 33, None), ("distance", None, 7)],
)
def test_kernels_do_what_the_definition_says(device, options, window, piece):
    ops = triton_backend.OPERATIONS
    agree(ops, device, window, piece, options_of(options, device), lengths=(1, 2, 17, 70))


@pytest.mark.parametrize(("window", "piece"), [(None, 7), (33, None)])
def test_rows_of_images_see_each_other_beside_others(device, window, piece):
    options = options_of("plain", device)
    agree_where_some_see_each_other(triton_backend.OPERATIONS, device, window, piece, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", ["plain", "distance", "alibi"])
@pytest.mark.parametrize(("window", "piece"), [(None, None), (None, 33), (65, None), (257, 100)])
def test_long_texts(device, window, piece, options, dtype):
    """Compiled: blocks that are seen whole lie between those that are not, on either side."""
    lengths = (1, 16, 127, 128, 512, 1025, 2000)
    ops = triton_backend.OPERATIONS
    agree(ops, device, window, piece, options_of(options, device), lengths=lengths, dtype=dtype)
