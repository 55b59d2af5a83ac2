"""The kernel of texts that are read as a whole: each token sees those behind it."""

from __future__ import annotations

import pytest
import torch

from support.kernels.whole_texts import agree, options_of
from tokenpod.kernels.backends import triton as triton_backend


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Fresh tensors hold NaN: what a kernel does not write shows."""


@pytest.mark.parametrize(
    ("options", "window", "apart"),
    [("plain", None, False), ("plain", 9, False), ("plain", 33, True), ("distance", None, True)],
)
def test_the_kernel_does_what_the_definition_says(device, options, window, apart):
    ops, options = triton_backend.OPERATIONS, options_of(options, window, 4, device)
    agree(ops, device, options, lengths=(1, 2, 17, 70), apart=apart)


@pytest.mark.parametrize("shape", [(3, 3, 80), (3, 1, 128)], ids=str)
def test_the_kernel_takes_heads_of_any_size(device, shape):
    options = options_of("plain", None, shape[0], device)
    agree(triton_backend.OPERATIONS, device, options, lengths=(1, 17, 70), shape=shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", ["plain", "distance"])
@pytest.mark.parametrize("window", [None, 65, 257])
@pytest.mark.parametrize("shape", [(4, 4, 32), (4, 4, 64), (6, 2, 96), (4, 2, 128), (3, 1, 256)])
def test_long_texts(device, window, options, shape, dtype):
    """Compiled: blocks that are seen whole lie between those that are not, on either side."""
    lengths = (1, 16, 127, 128, 512, 1025, 2000)
    options = options_of(options, window, shape[0], device)
    agree(triton_backend.OPERATIONS, device, options, lengths=lengths, shape=shape, dtype=dtype)
