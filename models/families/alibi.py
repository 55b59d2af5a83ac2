"""The slopes of ALiBi (Press et al. 2021), which follow from the number of heads."""

from __future__ import annotations

from tokenpod.models.layers.positions import Alibi


def alibi_of(heads: int, scale: float = 1.0, *, most: int = 8) -> Alibi:
    """Slopes times `scale`: a geometric series; between powers of two, some of a finer one.

    The last slope of a power of two heads is 2 ** -most.
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-most * i / whole) for i in range(1, whole + 1)]
    slopes += [2 ** (-most / 2 * i / whole) for i in range(1, 2 * (heads - whole), 2)]
    return Alibi(tuple(scale * slope for slope in slopes))
