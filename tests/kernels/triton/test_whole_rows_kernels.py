"""The kernel of prompts on rows of images, whose tokens see each other."""

from __future__ import annotations

import pytest

from support.kernels.whole_rows import agree_where_some_see_each_other, options_of
from tokenpod.kernels.backends import triton as triton_backend


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Fresh tensors hold NaN: what a kernel does not write shows."""


@pytest.mark.parametrize(("window", "piece"), [(None, 7), (33, None)])
def test_rows_of_images_see_each_other_beside_others(device, window, piece):
    options = options_of("plain", device)
    agree_where_some_see_each_other(triton_backend.OPERATIONS, device, window, piece, options)
