"""The engine of a server's defaults on a GPU, for several benchmarks."""

from __future__ import annotations

import argparse
from typing import Any


def server_like(gpu: Any, model: dict[str, Any]) -> Any:
    """The engine that a server makes by its defaults, with random weights of this shape.

    `gpu`: the module `gpu.py`, of this version or of another.
    """
    options = argparse.Namespace(
        rows=512,
        prefill=4096,
        positions=4096,
        kv_cache_dtype="auto",
        steps=False,
        quantize="none",
        quantize_head=False,
    )
    return gpu.make_bench(model, options)
