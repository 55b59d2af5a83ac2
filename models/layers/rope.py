"""The frequencies of rotary position embedding and the ways to stretch them.

Formulas: linear (position interpolation, Chen et al. 2023), llama3 (Llama 3.1's own), yarn (Peng et
al. 2023). `dynamic` (NTK-aware) changes nothing up to the trained length and would change the
cached keys of a shared prefix with every longer sequence, so it is served up to that length only.
`longrope` (Ding et al. 2024) has factors for short and for long sequences: which ones hold is
chosen once, by the longest sequence that is served, for the same reason.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layers.positions import Alibi, Rope

DEFAULT_THETA = 10_000.0
#: What parameters of yarn come to, at most: 32 turns and 1 are usual.
_MOST_TURNS, _MOST_SCALE = 1e6, 1e3


def head_order(positions: Rope | Alibi | None, head_dim: int) -> tuple[int, ...] | None:
    """In which order a head's rows are held, so that rotation always pairs i with i + D/2.

    Queries and keys are held in the same order, so their products are the same. None: as stored.
    """
    if not isinstance(positions, Rope):
        return None
    rotated, half = positions.rotated, head_dim // 2
    if rotated == head_dim and not positions.interleaved:
        return None
    step = 2 if positions.interleaved else 1
    firsts = range(0, rotated // 2 * step, step)
    seconds = range(1, rotated, 2) if positions.interleaved else range(rotated // 2, rotated)
    rest = range(rotated, head_dim)
    cut = half - rotated // 2
    return (*firsts, *rest[:cut], *seconds, *rest[cut:])


def pair_axes(positions: Rope | Alibi | None, head_dim: int) -> torch.Tensor | None:
    """[D/2] int64, in the order of `head_order`: which axis turns each pair; None: there is one."""
    axes = positions.axes if isinstance(positions, Rope) else ()
    return torch.tensor([*axes, *[0] * (head_dim // 2 - len(axes))]) if axes else None


def pair_frequencies(positions: Rope | Alibi | None, head_dim: int) -> torch.Tensor:
    """[D/2] float32, in the order of `head_order`; 0 for pairs that are not turned."""
    frequencies = positions.inverse_frequencies if isinstance(positions, Rope) else ()
    return torch.tensor([*frequencies, *[0.0] * (head_dim // 2 - len(frequencies))])


def rope_of(
    config: Fields,
    head_dim: int,
    max_positions: int,
    *,
    served: int | None = None,
    factor: float = 1.0,
    theta: float = DEFAULT_THETA,
    theta_name: str = "rope_theta",
    layer_type: str | None = None,
    interleaved: bool = False,
) -> Rope:
    """The rope that config.json describes, as `rope_parameters` or as `rope_scaling`.

    Args:
        config: of the model.
        head_dim: numbers of a head.
        max_positions: that the model can address.
        served: the longest sequence that will be; None: `max_positions`.
        factor: which part of a head is rotated, if the config does not say.
        theta: if the config does not say.
        theta_name: of the field beside `rope_scaling` that has it.
        layer_type: whose parameters count, where types of layers have their own. What is given
            once for all stretches "full_attention" only.
        interleaved: neighbours are pairs.

    Raises:
        ModelError: it is of a kind that is not supported, or can't be.
    """
    scaling = rope_parameters(config, layer_type)
    theta = scaling.real("rope_theta", config.real(theta_name, theta))
    factor = scaling.real("partial_rotary_factor", config.real("partial_rotary_factor", factor))
    if scaling.text("rope_type", "") == "proportional" and head_dim % 2 == 0 and factor <= 1:
        return _proportional(head_dim, theta, factor, scaling)
    rotated = int(head_dim * min(factor, 2.0))
    if head_dim % 2:
        raise ModelError(f"{config.source}: head_dim is {head_dim}; rotation needs an even number")
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ModelError(
            f"{config.source}: partial_rotary_factor is {factor:g}: of {head_dim} numbers of a "
            "head an even number must be rotated, and at most all"
        )
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    plain = 1.0 / (theta**exponents)
    rope = _stretched(plain, theta, config, scaling, max_positions, served)
    return replace(rope, interleaved=interleaved, axes=_axes(scaling, len(plain)))


def _axes(scaling: Fields, pairs: int) -> tuple[int, ...]:
    """Which axis of a position turns each pair: section after section, or by turns.

    By turns (Qwen3-VL) pairs 1, 4, 7 and so on are of height and 2, 5, 8 of width, as many as their
    sections have; all others are of time.
    """
    if "mrope_section" not in scaling:
        return ()
    sections = scaling.counts("mrope_section", 3)
    if sum(sections) != pairs:
        raise ModelError(
            f"{scaling.source}: mrope_section is {[*sections]}, together {sum(sections)}; "
            f"{pairs} pairs are rotated"
        )
    if not scaling.flag("mrope_interleaved", False):
        return tuple(axis for axis, length in enumerate(sections) for _ in range(length))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs))


def _proportional(head_dim: int, theta: float, factor: float, scaling: Fields) -> Rope:
    """Pairs of the whole head, of which the first are turned as if all were (Gemma 4)."""
    turned = int(factor * head_dim // 2)
    exponents = torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents) / scaling.real("factor", 1.0)
    return _rope(torch.cat([frequencies, torch.zeros(head_dim // 2 - turned)]))


def _stretched(
    plain: torch.Tensor,
    theta: float,
    config: Fields,
    scaling: Fields,
    max_positions: int,
    served: int | None,
) -> Rope:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind in ("default", "dynamic", "mrope"):
        return _rope(plain)
    if kind == "linear":
        return _rope(plain / scaling.real("factor"))
    if kind == "llama3":
        return _rope(_llama3(plain, scaling, max_positions))
    if kind == "yarn":
        return _yarn(plain, theta, scaling, max_positions)
    if kind in ("longrope", "su"):
        return _longrope(plain, config, scaling, max_positions, served or max_positions)
    raise ModelError(
        f"{scaling.source}: rope_type {kind!r} is not supported "
        "(supported: default, linear, dynamic, llama3, yarn, longrope)"
    )


def rope_parameters(config: Fields, layer_type: str | None = None) -> Fields:
    """The object that says how to rotate, whichever name it has; empty if there is none."""
    for name in ("rope_scaling", "rope_parameters"):
        if name in config:
            parameters = config.fields(name)
            if layer_type is not None and layer_type in parameters:
                return parameters.fields(layer_type)
            if layer_type not in (None, "full_attention"):
                continue
            if any(isinstance(value, dict) for value in parameters.values.values()):
                raise ModelError(f"{config.source}: {name} per layer type is not supported")
            return parameters
    return Fields({}, config.source)


def _rope(inverse_frequencies: torch.Tensor, scale: float = 1.0) -> Rope:
    if not (inverse_frequencies.isfinite().all() and math.isfinite(scale)):
        raise ModelError("config.json: rope's parameters make frequencies that are no numbers")
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


def _longrope(
    plain: torch.Tensor, config: Fields, scaling: Fields, max_positions: int, served: int
) -> Rope:
    """Each frequency divided by a factor of its own, of the set that suits what is served."""
    name = "original_max_position_embeddings"
    trained = scaling.integer(name, config.integer(name, max_positions))
    variant = "long" if min(served, max_positions) > trained else "short"
    factors = torch.tensor(scaling.reals(f"{variant}_factor", len(plain)))
    stretch = scaling.real("factor", max_positions / trained)
    scale = 1.0
    if f"{variant}_mscale" in scaling:
        scale = scaling.real(f"{variant}_mscale")
    elif "attention_factor" in scaling:
        scale = scaling.real("attention_factor")
    elif stretch > 1 < trained:
        scale = math.sqrt(1 + math.log(stretch) / math.log(trained))
    return replace(_rope(plain / factors, scale), variant=f"longrope, {variant} factors")


def _yarn(plain: torch.Tensor, theta: float, scaling: Fields, max_positions: int) -> Rope:
    """Dimensions that turn often keep their frequency, those that turn rarely are interpolated."""
    dims = 2 * len(plain)
    trained = scaling.integer("original_max_position_embeddings", max_positions)
    factor = scaling.real("factor", max_positions / trained)
    if theta <= 1:
        raise ModelError(f"{scaling.source}: rope_theta is {theta:g}; yarn needs more than 1")

    def dimension(turns: float) -> float:
        """The (fractional) dimension that turns so often in the trained length."""
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension(scaling.real("beta_fast", 32.0, most=_MOST_TURNS))
    last = dimension(scaling.real("beta_slow", 1.0, most=_MOST_TURNS))
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

    temperature = functools.partial(_temperature, factor)
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        of_all = scaling.real("mscale_all_dim", most=_MOST_SCALE)
        return temperature(scaling.real("mscale", most=_MOST_SCALE)) / temperature(of_all)
    return temperature(1.0)


def yarn_temperature(config: Fields) -> float:
    """What DeepSeek multiplies queries and keys by, besides what their rotation does."""
    scaling = rope_parameters(config)
    if scaling.values.get("mscale_all_dim") in (None, 0) or "factor" not in scaling:
        return 1.0
    return _temperature(scaling.real("factor"), scaling.real("mscale_all_dim", most=_MOST_SCALE))


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
