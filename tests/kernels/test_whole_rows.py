"""Attention of rows of images, whose tokens see each other, beside others."""

from __future__ import annotations

import pytest
import torch

from support.kernels.whole_rows import agree_where_some_see_each_other, options_of
from tokenpod.kernels.backends import cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize("piece", [None, 7], ids=["one-run", "pieces"])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("options", ["plain", "alibi"])
def test_rows_of_images_see_each_other_beside_others(options, window, piece):
    options = options_of(options, CPU)
    agree_where_some_see_each_other(cpu.OPERATIONS, CPU, window, piece, options)
