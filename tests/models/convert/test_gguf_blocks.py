"""Block formats of GGUF, against the dequantiser of the gguf package, on random bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tokenpod.models.convert.gguf_blocks import FORMATS, dequantised


@pytest.mark.parametrize("name", FORMATS)
def test_random_blocks_are_the_packages_numbers(name):
    kind = GGMLQuantizationType[name]
    numbers, size = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 256, (24, 20 * size), np.uint8)
    # Scales are whatever the bytes say, infinite ones and none-numbers too.
    with np.errstate(all="ignore"):
        made, expected = dequantised(data, name), dequantize(data, kind)
    assert made.dtype == np.float32
    assert made.shape == (24, 20 * numbers)
    assert np.isfinite(expected).mean() > 0.5
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_what_was_quantised_is_near(name):
    kind = GGMLQuantizationType[name]
    weights = np.random.default_rng(2).standard_normal((8, 256), np.float32)
    made = dequantised(quantize(weights, kind), name)
    step = np.abs(weights).max() / (127 if name == "Q8_0" else 7)
    assert np.abs(made - weights).max() < step
