"""`tokenpod quantize`: a quantised checkpoint of a dense one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tokenpod.commands.child import made
from tokenpod_client.cli.errors import print_error
from tokenpod_client.cli.options import argument, command, option

#: Its job is added. It imports torch: it is a process of its own.
QUANTIZE_COMMAND = (sys.executable, "-P", "-m", "tokenpod.models.quantise")


class Format(StrEnum):
    """What weights become."""

    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"


class Device(StrEnum):
    """Where it is computed."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is quantised, and how."""

    source: Path = argument("A folder with a dense checkpoint.", "SOURCE")
    folder: Path = argument("The folder to make.", "FOLDER")
    format: Format | None = option("Of the weights of products; by default int4.")
    group_size: int | None = option(
        "Inputs that share a scale, of int4; by default 128.", "N", min=8
    )
    calibrate: Path | None = option(
        "Choose numbers so that products change least on this text (GPTQ).", "FILE"
    )
    calibrate_tokens: int = option("Tokens of that text, at most.", "N", min=1, default=65_536)
    device: Device | None = option("Where it is computed; by default on the CPU.")
    shard_size: float = option("The most that a file holds.", "GB", min=0.001, default=5)


@command(Wanted)
def quantize(wanted: Wanted) -> int:
    """Make a quantised checkpoint of a dense one, in compressed-tensors' layout.

    Embedding, head, norms and biases stay as they are. The folder appears whole, with the digests
    of its files.
    """
    form = wanted.format or Format.INT4
    if wanted.group_size is not None and form is not Format.INT4:
        print_error(f"--group-size is for --format int4; {form} has a scale per output")
        return 1
    job = {
        "source": str(wanted.source.absolute()),
        "format": form,
        "group": wanted.group_size,
        "calibrate": str(wanted.calibrate.absolute()) if wanted.calibrate else None,
        "tokens": wanted.calibrate_tokens,
        "device": wanted.device or Device.CPU,
        "shard_bytes": int(wanted.shard_size * 1e9),
    }
    done = made(wanted.folder, QUANTIZE_COMMAND, job)
    if done is None:
        return 1
    print(f"{wanted.folder}: {done['quantised']} weights as {form}, {done['bytes']:,} bytes")
    return 0
