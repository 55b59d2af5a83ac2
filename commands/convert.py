"""`tokenpod convert`: checkpoints of other kinds become safetensors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenpod.core.staging import StagingError, staging
from tokenpod.service.telemetry.logs import print_error

#: Its job is added. It imports torch, and opens what may be hostile: it is a process of its own.
CONVERT_COMMAND = (sys.executable, "-P", "-m", "tokenpod.models.convert")


class Kind(StrEnum):
    """Types of real numbers."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class ConvertError(Exception):
    """It can't be converted; one line."""


def convert(
    source: Annotated[
        Path, typer.Argument(help="A folder with .bin files or safetensors, or a GGUF file.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    lora: Annotated[
        Path | None, typer.Option(help="Merge the LoRA adapter in this folder (PEFT's layout).")
    ] = None,
    dtype: Annotated[
        Kind | None,
        typer.Option(help="Type of real numbers; as they are, and bfloat16 for quantised ones."),
    ] = None,
    shard_size: Annotated[
        float, typer.Option(min=0.001, metavar="GB", help="The most that a file holds.")
    ] = 5,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="GB",
            help="Memory of the conversion; by default 8 GiB, and twice the largest .bin file.",
        ),
    ] = None,
    time_limit: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="Time of the conversion.")
    ] = 3600,
) -> None:
    """Make safetensors of a .bin checkpoint or a GGUF file, or merge a LoRA adapter.

    Files are opened by a process without network, with limits on memory and time. The folder
    appears whole, with the digests of its files.
    """
    job = {
        "source": str(source.absolute()),
        "lora": str(lora.absolute()) if lora else None,
        "dtype": dtype,
        "shard_bytes": int(shard_size * 1e9),
        "memory": int(memory_limit * 1e9) if memory_limit else None,
        "seconds": time_limit,
    }
    try:
        with staging(folder) as part:
            done = _run({**job, "folder": str(part.folder)}, time_limit)
            part.finish()
    except (StagingError, ConvertError) as error:
        print_error(str(error), json_output=False)
        raise typer.Exit(1) from None
    except OSError as error:
        print_error(f"{folder}: {error.strerror or error}", json_output=False)
        raise typer.Exit(1) from None
    print(f"{folder}: {done['tensors']} tensors, {done['bytes']:,} bytes")
    if done["problem"]:
        text = f"the server's own decoder does not read it: {done['problem']}"
        print_error(text, json_output=False, kind="warning")


def _run(job: dict[str, Any], seconds: int) -> dict[str, Any]:
    """What the process says of a job; ConvertError if it says nothing, or what is wrong."""
    command = [*CONVERT_COMMAND, json.dumps(job)]
    limit = f"it took more than {seconds} s (--time-limit)"
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ConvertError(f"{job['source']}: {limit}") from None
    finally:
        process.kill()
        process.wait()
    try:
        done: dict[str, Any] = json.loads(said)
    except ValueError:
        why = limit if process.returncode == -signal.SIGXCPU else _ended(process.returncode)
        raise ConvertError(f"{job['source']}: {why}") from None
    if "error" in done:
        raise ConvertError(done["error"])
    return done


def _ended(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        return f"its process was ended by {name}, perhaps for want of memory"
    return f"its process ended with status {status}"
