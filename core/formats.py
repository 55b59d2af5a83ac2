"""The names of formats that weights of products can be made into while they are loaded."""

from __future__ import annotations

from typing import Literal

#: Values of `--quantize`.
Quantize = Literal["none", "int8"]

#: What the setting's description says of each.
ABOUT: dict[Quantize, str] = {
    "int8": "8 bits and a scale per output, half of bfloat16's memory, a little less exact",
}
