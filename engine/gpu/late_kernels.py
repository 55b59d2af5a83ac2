"""Kernels that are compiled while requests wait for them."""

from __future__ import annotations

from triton import knobs


class LateKernels:
    """Counts what Triton compiles from now on; what its cache has is not compiled."""

    def __init__(self) -> None:
        self.count = 0
        knobs.compilation.listener = self._note

    def _note(self, *, cache_hit: bool, **_: object) -> None:
        self.count += not cache_hit
