"""From a folder with config.json and safetensors to a decoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tokenpod.kernels.registry import operations_for
from tokenpod.models.checkpoint import Checkpoint, Progress, check, read_weights
from tokenpod.models.config import DecoderConfig
from tokenpod.models.decoder import Decoder
from tokenpod.models.errors import ModelError
from tokenpod.models.families import FAMILIES, Family
from tokenpod.models.fields import Fields, read_fields
from tokenpod.models.memory import available_bytes
from tokenpod.models.weights import Weight, expand

__all__ = ["ModelError", "load_model", "read_config"]


def read_config(folder: Path) -> DecoderConfig:
    """What config.json (and generation_config.json, for the end-of-text tokens) say.

    Raises ModelError if a file or field is missing or wrong, or the architecture is unknown.
    """
    return _read_config(folder)[1]


def load_model(
    folder: Path, *, dtype: torch.dtype | None, device: torch.device, progress: Progress
) -> Decoder:
    """Load a checkpoint; `dtype` None keeps the checkpoint's.

    `progress` is called with bytes read so far and in all, first with 0. Raises ModelError with one
    line for whatever is wrong with the folder, and if the weights don't fit into memory.
    """
    family, config = _read_config(folder)
    with Checkpoint(folder) as checkpoint:
        if "lm_head.weight" not in checkpoint:
            config = dataclasses.replace(config, tied_head=True)
        weights = expand(family.weights(config), config.layers)
        check(checkpoint, weights, config)
        dtype = dtype or config.dtype or torch.float32
        _check_memory(checkpoint, weights, dtype, device)
        try:
            tensors = read_weights(
                checkpoint, weights, dtype=dtype, device=device, progress=progress
            )
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelError(f"{folder}: not enough memory for the weights ({error})") from None
    return Decoder(config, tensors, operations_for(device, dtype))


def _read_config(folder: Path) -> tuple[Family, DecoderConfig]:
    fields = read_fields(folder / "config.json")
    if "quantization_config" in fields:
        raise ModelError(f"{folder}: quantised checkpoints are not supported")
    family = _family(fields)
    config = family.config(fields)
    if (folder / "generation_config.json").is_file():
        generation = read_fields(folder / "generation_config.json")
        eos = generation.token_ids("eos_token_id") or config.eos_token_ids
        config = dataclasses.replace(config, eos_token_ids=eos)
    return family, config


def _family(fields: Fields) -> Family:
    names = fields.texts("architectures")
    for family in FAMILIES:
        if names and names[0] in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelError(
        f"{fields.source}: architecture {', '.join(names) or 'none'} is not supported "
        f"(supported: {known})"
    )


def _check_memory(
    checkpoint: Checkpoint, weights: list[Weight], dtype: torch.dtype, device: torch.device
) -> None:
    numbers = sum(
        torch.Size(checkpoint.shape(source.name)).numel()
        for weight in weights
        for source in weight.sources
    )
    needed, available = numbers * dtype.itemsize, available_bytes(device)
    if available is not None and needed > available:
        raise ModelError(
            f"the weights need {needed / 1e9:.2f} GB as {str(dtype).removeprefix('torch.')}; "
            f"{available / 1e9:.2f} GB of memory are available"
        )
