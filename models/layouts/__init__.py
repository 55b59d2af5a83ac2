"""Layouts in which quantised checkpoints are published: a module each, chosen by the config."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields, read_fields
from tokenpod.models.layouts.awq import read_awq
from tokenpod.models.layouts.bitsandbytes import read_bitsandbytes
from tokenpod.models.layouts.compressed_tensors import read_compressed_tensors
from tokenpod.models.layouts.fp8 import read_fbgemm_fp8, read_fp8
from tokenpod.models.layouts.gptq import read_gptq
from tokenpod.models.layouts.modelopt import read_modelopt
from tokenpod.models.layouts.module import FamilyLayout, PublishedLayout

#: By `quant_method`.
READERS: dict[str, Callable[[Fields], PublishedLayout | None]] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
}

#: Files beside a config.json that does not say how weights are quantised, and their layout.
_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


def layout_of(folder: Path, fields: Fields, known: Collection[str] = ()) -> PublishedLayout | None:
    """How the checkpoint in a folder is quantised; None: it is not.

    Args:
        folder: with config.json, and beside it what older tools wrote.
        fields: of config.json.
        known: layouts that the model's family tells by names of its own.

    Raises ModelError, naming the field that says so, for a layout that is not read.
    """
    method, own = _config(folder, fields)
    if own is None:
        return None
    if method in known:
        return FamilyLayout(method)
    if method not in READERS:
        raise ModelError(
            f"{own.source}: quant_method {method!r} is not supported "
            f"(supported: {', '.join(map(repr, READERS))})"
        )
    return READERS[method](own)


def _config(folder: Path, fields: Fields) -> tuple[str, Fields | None]:
    """`quant_method`, and the fields that belong to it."""
    for name in ("quantization_config", "compression_config"):
        if name in fields:
            own = fields.fields(name)
            # Before it was a field, only one kind had none.
            default = "bitsandbytes" if "load_in_8bit" in own or "load_in_4bit" in own else ""
            return own.text("quant_method", default), own
    for file, method in _FILES.items():
        if (folder / file).is_file():
            return method, read_fields(folder / file)
    return "", None
