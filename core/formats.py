"""The names of formats that weights of products can be made into while they are loaded."""

from __future__ import annotations

from typing import Literal

#: Values of `--quantize`.
Quantize = Literal["none", "int8", "fp8", "int4"]

#: What the setting's description says of each.
ABOUT: dict[Quantize, str] = {
    "int8": "8 bits and a scale per output, half of bfloat16's memory, a little less exact",
    "fp8": "8 bits with an exponent (e4m3) and a scale per output; inputs are rounded likewise, a "
    "scale per token",
    "int4": "4 bits in groups of 128 inputs, little more than a quarter of the memory, less exact",
}
