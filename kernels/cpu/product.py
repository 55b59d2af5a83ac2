"""Products with a weight, each by the fastest way for its number of rows."""

from __future__ import annotations

from tokenpod.kernels.reference.product import prepare_linear

__all__ = ["prepare_linear"]
