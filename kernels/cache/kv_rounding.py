"""Writes keys and values to a pool of any dtype, rounded as it holds them; the specification."""

from __future__ import annotations

import torch

from tokenpod.kernels.operations.attention_ops import KVScales

#: A head whose numbers are all smaller is stored as zeros: what it is divided by would be infinite.
LEAST_LARGEST = 1e-36


def store(
    x: torch.Tensor, pool: torch.Tensor, t_slot: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Write x [T, K, D] to slots t_slot [T] of a pool, see `KVScales`."""
    if scale is None:
        pool[t_slot] = x.to(pool.dtype)
    elif pool.dtype == torch.int8:
        pool[t_slot], scale[t_slot] = quantise_each(x)
    else:
        # As integers: numbers of 8 bits can be moved, but not by that name.
        pool.view(torch.uint8)[t_slot] = quantise(x, scale).view(torch.uint8)


def refuse_other_scales(keys: torch.Tensor, scales: KVScales | None) -> None:
    """Raise NotImplementedError for scaled keys and values that are not int8: CPUs read no others.

    Settings refuse them at start, so this is a fault of the caller.
    """
    if scales is not None and keys.dtype != torch.int8:
        raise NotImplementedError(f"keys and values of {keys.dtype} need a GPU")


def quantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """X [T, K, D] as e4m3 multiples of scale [K]; what is too large becomes the largest."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale[:, None]).clamp(-most, most).to(torch.float8_e4m3fn)


def quantise_each(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """X [T, K, D] as int8 multiples of a scale [T, K] for each head of each token.

    A head with a number that is not finite has a scale that is not, so it reads as such.
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    usable = largest.isfinite() & (largest > LEAST_LARGEST)
    inverse = torch.where(usable, 127 / largest, 0.0)
    numbers = (wide * inverse[..., None]).nan_to_num(0).round()
    return numbers.to(torch.int8), largest / 127
