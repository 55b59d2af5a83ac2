"""One conversion: a source, perhaps an adapter, and an empty folder for the result."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from tokenpod.core.manifest import digest_of, write_manifest
from tokenpod.core.model_files import PICKLES, small_files
from tokenpod.models.adapters import lora
from tokenpod.models.checkpoints.checkpoint import INDEX as INDEX_NAME
from tokenpod.models.checkpoints.checkpoint import SINGLE as SINGLE_NAME
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.checkpoints.source import Safetensors, Source
from tokenpod.models.checkpoints.writer import Planned, Progress, write_tensors
from tokenpod.models.convert import pickles
from tokenpod.models.convert.gguf_parts import parts_of
from tokenpod.models.convert.gguf_source import Gguf
from tokenpod.models.folder import read_config, read_layout
from tokenpod.models.medusa import is_medusa, open_medusa, read_medusa

#: Room for the largest tensors that there are, twice, and what libraries need.
_MEMORY = 8 << 30


class Job(msgspec.Struct, frozen=True):
    """What to convert.

    Attributes:
        source: a folder with pickles or safetensors, or a GGUF file.
        folder: empty, for the result.
        lora: an adapter's folder, to be merged.
        dtype: of real numbers: "float32", "bfloat16", "float16"; None: as they are, and bfloat16
            for quantised ones.
        shard_bytes: the most that a file of the result has.
        memory: bytes that the process may have beyond what it has at first; None: 8 GiB, and
            twice the largest pickle.
        seconds: of a processor that the process may take.
    """

    source: str
    folder: str
    lora: str | None = None
    dtype: str | None = None
    shard_bytes: int = 5 << 30
    memory: int | None = None
    seconds: int = 3600


class Converted(msgspec.Struct, frozen=True):
    """What came of it; `problem` says why, as it is, the server would refuse it."""

    tensors: int
    bytes: int
    problem: str | None = None


def convert(job: Job, progress: Progress) -> Converted:
    """Fill the job's folder. Raises ModelError with one line, whatever is wrong."""
    folder = Path(job.folder)
    dtype: torch.dtype | None = getattr(torch, job.dtype) if job.dtype else None
    try:
        source = _source(Path(job.source), dtype)
        source.write_small_files(folder)
        tensors = list(source.tensors())
        if job.lora is not None:
            tensors = lora.merged(tensors, Path(job.lora))
        tensors = [tensor.as_dtype(dtype) for tensor in tensors]
        if dtype is not None or isinstance(source, Gguf):
            _note_dtype(folder / "config.json", dtype or _usual(tensors))
        digests = write_tensors(folder, tensors, most=job.shard_bytes, progress=progress)
        names = [*small_files(folder), *pickles.convert_words(Path(job.source), folder)]
        if (folder / INDEX_NAME).is_file():
            names.append(INDEX_NAME)
        digests |= {name: digest_of(folder / name) for name in names}
        write_manifest(folder, digests)
    except (MemoryError, RuntimeError) as error:
        # PyTorch says so in many ways, the system in one.
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        text = f"converting it takes more than {memory_of(job):,} bytes (--memory-limit)"
        raise ModelError(f"{job.source}: {text}") from None
    except OSError as error:
        raise ModelError(_of_disk(error, folder)) from None
    return Converted(len(tensors), sum(t.size for t in tensors), _problem(folder))


def memory_of(job: Job) -> int:
    """Bytes of memory that the conversion may have."""
    if job.memory is not None:
        return job.memory
    found = (path for kind in PICKLES for path in Path(job.source).glob(kind))
    pickled = [path.stat().st_size for path in found]
    return _MEMORY + 2 * max(pickled, default=0)


def _source(path: Path, dtype: torch.dtype | None) -> Source:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a folder nor a .gguf file")
        return Gguf(path, dtype or torch.bfloat16)
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such folder or file")
    if any((path / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        return Safetensors(path)
    if any((path / name).is_file() for name in (pickles.SINGLE, pickles.INDEX, pickles.HEADS)):
        return pickles.Pickles(path)
    found = sorted(path.glob("*.gguf"))
    if found and found == parts_of(found[0]):
        return Gguf(found[0], dtype or torch.bfloat16)
    if found:
        raise ModelError(f"{path} has {len(found)} GGUF files; name one of them")
    raise ModelError(f"{path} is no model: it has no weights (safetensors, {pickles.SINGLE}, GGUF)")


def _usual(tensors: Sequence[Planned]) -> torch.dtype:
    """The type of most of the bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.size
    return sizes.most_common(1)[0][0]


def _note_dtype(path: Path, dtype: torch.dtype) -> None:
    """Let config.json say what the weights are now."""
    config = dict(read_fields(path).values)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _problem(folder: Path) -> str | None:
    """Why the server's own decoder can't read the result; None: it can."""
    try:
        if is_medusa(folder):
            with open_medusa(folder) as checkpoint:
                read_medusa(folder, checkpoint)
            return None
        read_config(folder)
        with Checkpoint(folder) as checkpoint:
            read_layout(folder, checkpoint)
    except ModelError as error:
        return str(error)
    return None


def _of_disk(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{folder.parent}: no room is left for the result ({os.strerror(error.errno)})"
    return f"{error.filename or folder}: {error.strerror or error}"
