"""Layouts of keys and values."""

from __future__ import annotations

from tokenpod.kernels.cache.kv_pool import KVLayout


def alike(heads: int, head_dim: int) -> KVLayout:
    """Keys and values of one size."""
    return KVLayout(heads, head_dim, head_dim)
