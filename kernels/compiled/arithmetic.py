"""Exponentials that a compiler can do sixteen at a time."""

from __future__ import annotations

import numpy as np

from tokenpod.kernels.compiled.loops import inlined

_F = np.float32
LOG2_E = _F(1.4426950408889634)

# 2**r for r in [-1/2, 1/2]: a polynomial of degree 6 through Chebyshev points, off by 2e-8 at most.
EXP2_TERMS = (
    _F(1.0), _F(6.9314718e-01), _F(2.4022651e-01), _F(5.5503272e-02),
    _F(9.6180253e-03), _F(1.3400526e-03), _F(1.5469812e-04),
)  # fmt: skip
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = EXP2_TERMS


@inlined()
def exp2(x):
    """2**x in float32 for x from -126 to 127, and as at these ends beyond them; NaN stays NaN."""
    x = _F(-126.0) if x < _F(-126.0) else x
    x = _F(127.0) if x > _F(127.0) else x
    whole = np.floor(x + _F(0.5))
    r = x - whole
    p = _C5 + r * _C6
    p = _C4 + r * p
    p = _C3 + r * p
    p = _C2 + r * p
    p = _C1 + r * p
    p = _C0 + r * p
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
