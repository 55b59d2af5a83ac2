"""Names for blocks of texts: equal ones stand for equal tokens behind equal beginnings.

A block is some tokens at a multiple of as many from the beginning of a text. Its key is a
blake2b digest of its tokens and the key before it; the first one follows the salt, as the roots of
the prefix tree do.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_DIGEST = 16  # bytes

Key = bytes


def root_key(salt: str) -> Key:
    """What stands before the first block of texts with this salt."""
    return blake2b(salt.encode(), digest_size=_DIGEST).digest()


def next_key(before: Key, tokens: npt.NDArray[np.int32]) -> Key:
    """The key of a block of these tokens, [n], behind the block with the key `before`."""
    return blake2b(before + tokens.tobytes(), digest_size=_DIGEST).digest()
