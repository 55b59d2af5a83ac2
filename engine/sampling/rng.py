"""Randomness without state: Philox4x32-10.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011. A draw is a pure function of a
key and a counter, so a sequence's samples do not depend on its batch, its row, the device or on
what was drawn before. Words are kept in int64 tensors, 32 bits each.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLY_0, _MULTIPLY_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four words of 32 random bits for each counter; everything broadcasts.

    Args:
        counter: four int64 tensors of 32-bit words, the lowest first.
        key: two, likewise.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products wrap around in 64 bits; both halves are right all the same. c1 and c3 carry
        # their high halves along, which the masks then take off.
        p0, p1 = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        c0, c1, c2, c3 = (
            ((p1 >> 32) ^ c1 ^ k0) & _MASK,
            p1,
            ((p0 >> 32) ^ c3 ^ k1) & _MASK,
            p0,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def split(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The low and high words of 64-bit integers (int64, two's complement)."""
    return value & _MASK, (value >> 32) & _MASK


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1): the 23 high bits and half a step, so that neither end is reached."""
    return ((bits >> 9).to(torch.float32) + 0.5) * 2.0**-23


def token_noise(
    seed: torch.Tensor, stream: torch.Tensor, position: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """Exponential(1) noise of tokens: argmax of p / noise draws a token with probability p.

    Args:
        seed: int64, the key.
        stream: int64 below 2^32: which sample of a request.
        position: int64 below 2^32: which output token.
        token: int64 vocabulary ids. All four broadcast.

    Returns:
        float32, above 0. Token v takes word v mod 4 of counter (v // 4, position, stream, 0).
    """
    block = torch.div(token, 4, rounding_mode="floor")
    zero = torch.zeros_like(position)
    counter = (block, position, stream, zero)
    words = torch.stack(_same_shape(philox(counter, split(seed))))
    which = (token % 4).expand(words.shape[1:]).unsqueeze(0)
    return -torch.log(uniform(words.gather(0, which).squeeze(0)))


def vocabulary_noise(
    seed: torch.Tensor, stream: torch.Tensor, position: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`token_noise` of the whole vocabulary, four tokens a counter.

    Args:
        seed, stream, position: [n] int64.

    Returns:
        [n, vocab_size] float32.
    """
    block = torch.arange(-(-vocab_size // 4), device=seed.device)[None, :]
    low, high = split(seed[:, None])
    zero = torch.zeros_like(block)
    counter = (block, position[:, None], stream[:, None], zero)
    words = torch.stack(_same_shape(philox(counter, (low, high))), dim=-1)
    return -torch.log(uniform(words.flatten(1)[:, :vocab_size]))


def _same_shape(words: Words) -> tuple[torch.Tensor, ...]:
    return torch.broadcast_tensors(*words)  # type: ignore[no-any-return, no-untyped-call]
