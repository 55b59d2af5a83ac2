"""The names of formats that weights of products can be made into, and of checkpoints' layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

#: Values of `--quantize`.
Quantize = Literal[
    "none",
    "int8",
    "fp8",
    "int4",
    "awq",
    "bitsandbytes",
    "bitsandbytes-fp4",
    "bitsandbytes-nf4",
    "compressed-tensors",
    "eetq",
    "exl2",
    "gptq",
    "marlin",
    "modelopt",
    "mxfp4",
]

#: What the setting's description says of each that is made while loading.
ABOUT: dict[Quantize, str] = {
    "int8": "8 bits and a scale per output, half of bfloat16's memory, a little less exact",
    "fp8": "8 bits with an exponent (e4m3) and a scale per output; inputs are rounded likewise, a "
    "scale per token",
    "int4": "4 bits in groups of 128 inputs, little more than a quarter of the memory, less exact",
}

#: Names that TGI's launcher has for what it makes while loading, and what is nearest to it here.
SAME_AS: Mapping[str, str] = {
    "bitsandbytes": "int8",
    "bitsandbytes-fp4": "int4",
    "bitsandbytes-nf4": "int4",
    "eetq": "int8",
}

#: Layouts of checkpoints that a value accepts, by the value.
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "awq": ("awq",),
    "bitsandbytes": ("bitsandbytes",),
    "bitsandbytes-fp4": ("bitsandbytes",),
    "bitsandbytes-nf4": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "exl2": (),
    "fp8": ("fp8", "fbgemm_fp8", "modelopt"),
    "gptq": ("gptq",),
    #: A kernel of TGI's, for either.
    "marlin": ("gptq", "awq"),
    "modelopt": ("modelopt",),
    "mxfp4": ("mxfp4",),
}
