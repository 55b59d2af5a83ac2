"""Formats of fewer bits that weights of products are held in."""

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight

#: Those that are made while loading, by their names in `core.formats`.
MADE_AT_LOAD: dict[str, type[QuantisedWeight]] = {
    "int8": Int8Weight,
    "fp8": Fp8Weight,
    "int4": Int4Weight,
}
