"""Formats of fewer bits that weights of products are held in."""

from tokenpod.kernels.formats.fp8 import Fp8Weight
from tokenpod.kernels.formats.int4 import Int4Weight
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.weight import QuantisedWeight

#: Those that are made while loading, by their names in `core.formats`.
MADE_AT_LOAD: dict[str, type[QuantisedWeight]] = {
    "int8": Int8Weight,
    "fp8": Fp8Weight,
    "int4": Int4Weight,
}
