"""The frequencies of rotary position embedding and the ways to stretch them.

Formulas: linear (position interpolation, Chen et al. 2023), llama3 (Llama 3.1's own), yarn (Peng et
al. 2023). `dynamic` (NTK-aware) changes nothing up to the trained length and would change the
cached keys of a shared prefix with every longer sequence, so it is served up to that length only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tokenpod.models.errors import ModelError
from tokenpod.models.fields import Fields

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Inverse wavelengths of a head's pairs of dimensions, and a scale of the embedding."""

    #: [D/2] radians a position.
    inverse_frequencies: tuple[float, ...]
    #: Multiplies sines and cosines.
    scale: float = 1.0


def rope_of(config: Fields, head_dim: int, max_positions: int) -> Rope:
    """The rope that config.json describes, as `rope_parameters` or as `rope_scaling`.

    Raises ModelError for a kind that is not supported.
    """
    if head_dim % 2:
        raise ModelError(f"{config.source}: head_dim is {head_dim}; rotation needs an even number")
    scaling = _parameters(config)
    theta = scaling.real("rope_theta", config.real("rope_theta", DEFAULT_THETA))
    if scaling.real("partial_rotary_factor", config.real("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{config.source}: partial_rotary_factor is not supported")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (theta**exponents)
    if kind in ("default", "dynamic"):
        return _rope(plain)
    if kind == "linear":
        return _rope(plain / scaling.real("factor"))
    if kind == "llama3":
        return _rope(_llama3(plain, scaling, max_positions))
    if kind == "yarn":
        return _yarn(plain, theta, scaling, max_positions)
    raise ModelError(
        f"{scaling.source}: rope_type {kind!r} is not supported "
        "(supported: default, linear, dynamic, llama3, yarn)"
    )


def _parameters(config: Fields) -> Fields:
    """The object that says how to rotate, whichever name it has; empty if there is none."""
    for name in ("rope_scaling", "rope_parameters"):
        if name in config:
            parameters = config.fields(name)
            if any(isinstance(value, dict) for value in parameters.values.values()):
                raise ModelError(f"{config.source}: {name} per layer type is not supported")
            return parameters
    return Fields({}, config.source)


def _rope(inverse_frequencies: torch.Tensor, scale: float = 1.0) -> Rope:
    return Rope(tuple(inverse_frequencies.tolist()), scale)


def _llama3(plain: torch.Tensor, scaling: Fields, max_positions: int) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = scaling.real("factor")
    low, high = scaling.real("low_freq_factor"), scaling.real("high_freq_factor")
    trained = scaling.integer("original_max_position_embeddings", max_positions)
    if low >= high:
        raise ModelError(
            f"{scaling.source}: low_freq_factor {low:g} is not below high_freq_factor {high:g}"
        )
    turns = trained * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / factor)


def _yarn(plain: torch.Tensor, theta: float, scaling: Fields, max_positions: int) -> Rope:
    """Dimensions that turn often keep their frequency, those that turn rarely are interpolated."""
    dims = 2 * len(plain)
    trained = scaling.integer("original_max_position_embeddings", max_positions)
    factor = scaling.real("factor", max_positions / trained)

    def dimension(turns: float) -> float:
        """The (fractional) dimension that turns so often in the trained length."""
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension(scaling.real("beta_fast", 32.0))
    last = dimension(scaling.real("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(len(plain), dtype=torch.float32) - first) / width).clamp(0, 1)
    frequencies = plain / factor * stretched + plain * (1 - stretched)
    return _rope(frequencies, _yarn_scale(scaling, factor))


def _yarn_scale(scaling: Fields, factor: float) -> float:
    """YaRN's temperature, applied to queries and keys alike."""
    if "attention_factor" in scaling:
        return scaling.real("attention_factor")

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return temperature(scaling.real("mscale")) / temperature(scaling.real("mscale_all_dim"))
    return temperature(1.0)
