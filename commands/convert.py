"""`tokenpod convert`: checkpoints of other kinds become safetensors."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tokenpod.commands.child import made
from tokenpod_client.cli.errors import print_error
from tokenpod_client.cli.options import argument, command, option

#: Its job is added. It imports torch, and opens what may be hostile: it is a process of its own.
CONVERT_COMMAND = (sys.executable, "-P", "-m", "tokenpod.models.convert")


class Kind(StrEnum):
    """Types of real numbers."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is converted, and within which limits."""

    source: Path = argument(
        "A folder with .bin files (or medusa_lm_head.pt) or safetensors, or a GGUF file.", "SOURCE"
    )
    folder: Path = argument("The folder to make.", "FOLDER")
    lora: Path | None = option("Merge the LoRA adapter in this folder (PEFT's layout).", "FOLDER")
    dtype: Kind | None = option(
        "Type of real numbers; as they are, and bfloat16 for quantised ones."
    )
    shard_size: float = option("The most that a file holds.", "GB", min=0.001, default=5)
    memory_limit: float | None = option(
        "Memory of the conversion; by default 8 GiB, and twice the largest .bin file.",
        "GB",
        min=0.1,
    )
    time_limit: int = option("Time of the conversion.", "SECONDS", min=1, default=3600)


@command(Job)
def convert(wanted: Job) -> int:
    """Make safetensors of a .bin checkpoint or a GGUF file, or merge a LoRA adapter.

    Files are opened by a process without network, with limits on memory and time. The folder
    appears whole, with the digests of its files.
    """
    job = {
        "source": str(wanted.source.absolute()),
        "lora": str(wanted.lora.absolute()) if wanted.lora else None,
        "dtype": wanted.dtype,
        "shard_bytes": int(wanted.shard_size * 1e9),
        "memory": int(wanted.memory_limit * 1e9) if wanted.memory_limit else None,
        "seconds": wanted.time_limit,
    }
    limit = f"it took more than {wanted.time_limit} s (--time-limit)"
    done = made(wanted.folder, CONVERT_COMMAND, job, seconds=wanted.time_limit, limit=limit)
    if done is None:
        return 1
    print(f"{wanted.folder}: {done['tensors']} tensors, {done['bytes']:,} bytes")
    if done["problem"]:
        text = f"the server's own decoder does not read it: {done['problem']}"
        print_error(text, kind="warning")
    return 0
