"""How numbers are chosen: the nearest, or by GPTQ, so that products change least.

GPTQ (Frantar et al. 2022, arXiv 2210.17323): inputs are rounded one after the other, and what one's
rounding takes from the products of a text is made up for by those that are still to be rounded.
"""

from __future__ import annotations

import torch

from tokenpod.models.quantise.targets import Target

#: Of the mean of the diagonal, added to it: what was seldom seen is not trusted.
DAMPING = 0.01
#: Inputs that are rounded before what they change is taken to all others.
_BLOCK = 128


def nearest(
    weight: torch.Tensor, target: Target, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] -> numbers [out, in] float32 and scales [out, groups] in `dtype`."""
    weight = weight.float()
    scale = target.scales(weight, dtype)
    wide = scale.float().repeat_interleave(target.length(weight.shape[1]), 1)
    return target.rounded(weight / wide), scale


def least_change(
    weight: torch.Tensor, second: torch.Tensor, target: Target, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by GPTQ.

    Args:
        weight: [out, in].
        second: [in, in] float32, Σ x · xᵀ of inputs x that the product gets.
        target: what it becomes. Scales are those of `nearest`.
        dtype: of the scales.
    """
    weight = weight.float().clone()
    scale = target.scales(weight, dtype)
    wide = scale.float().repeat_interleave(target.length(weight.shape[1]), 1)
    # Those that matter most are rounded first, while the most others can make up for them.
    order = second.diagonal().argsort(descending=True)
    root = _root(second[order][:, order])
    numbers = _rounded_in_turn(weight[:, order], wide[:, order], root, target)
    return numbers[:, order.argsort()], scale


def _root(second: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped matrix's inverse."""
    damped = second.clone()
    mean = damped.diagonal().mean()
    damped.diagonal().add_(DAMPING * mean + torch.finfo(torch.float32).tiny)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    root: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return root


def _rounded_in_turn(
    weight: torch.Tensor, scale: torch.Tensor, root: torch.Tensor, target: Target
) -> torch.Tensor:
    """Numbers of a weight whose inputs are in order; changes `weight`."""
    inputs = weight.shape[1]
    numbers = torch.empty_like(weight)
    for start in range(0, inputs, _BLOCK):
        end = min(start + _BLOCK, inputs)
        errors = torch.empty_like(weight[:, start:end])
        for i in range(start, end):
            numbers[:, i] = target.rounded(weight[:, i] / scale[:, i])
            error = (weight[:, i] - numbers[:, i] * scale[:, i]) / root[i, i]
            weight[:, i:end] -= error[:, None] * root[i, i:end]
            errors[:, i - start] = error
        weight[:, end:] -= errors @ root[start:end, end:]
    return numbers
