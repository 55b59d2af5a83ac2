"""The kernel of prompts on texts that are read as a whole: each token sees those behind it."""

from __future__ import annotations

import pytest

from support.kernels.whole_rows import agree, options_of
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
