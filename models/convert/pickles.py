"""PyTorch's pickled checkpoints, read by its unpickler that makes tensors and nothing else."""

from __future__ import annotations

import pickle
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenpod.models.checkpoints.checkpoint import files_of
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.source import copy_small_files
from tokenpod.models.checkpoints.writer import Planned

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
#: What Medusa heads are published as.
HEADS = "medusa_lm_head.pt"
#: What BGE-M3 weighs tokens with, without its ending.
WORDS = "sparse_linear"


class Pickles:
    """A folder with `pytorch_model.bin`, several files and an index, or Medusa heads.

    One file is open at a time. Those of torch 1.6 and later are mapped; older ones are in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[Path, Mapping[str, torch.Tensor]] | None = None

    def tensors(self) -> Sequence[Planned]:
        """All of them; ModelError for a name that two files have."""
        found: dict[str, Planned] = {}
        single = HEADS if (self._folder / HEADS).is_file() else SINGLE
        for path in files_of(self._folder, single, INDEX):
            for name, tensor in self._state(path).items():
                if name in found:
                    raise ModelError(f"{path}: {name} is also in another file")
                read = _Read(self, path, name)
                found[name] = Planned(name, tensor.dtype, tuple(tensor.shape), read)
        return list(found.values())

    def write_small_files(self, folder: Path) -> None:
        """The same files."""
        copy_small_files(self._folder, folder)

    def _state(self, path: Path) -> Mapping[str, torch.Tensor]:
        if self._open is None or self._open[0] != path:
            # The one before goes first.
            self._open = None
            self._open = path, load(path)
        return self._open[1]


def convert_words(source: Path, folder: Path) -> list[str]:
    """What weighs tokens as words (BGE-M3), from its file beside a model's to one of safetensors.

    Returns the file's name, if there is one. Raises ModelError for what is no such file.
    """
    made = f"{WORDS}.safetensors"
    if (source / made).is_file():
        shutil.copyfile(source / made, folder / made)
    elif (source / f"{WORDS}.pt").is_file():
        save_file(dict(load(source / f"{WORDS}.pt")), folder / made)
    else:
        return []
    return [made]


class _Read:
    """Reads one tensor when its turn comes."""

    def __init__(self, pickles: Pickles, path: Path, name: str) -> None:
        self._pickles, self._path, self._name = pickles, path, name

    def __call__(self) -> torch.Tensor:
        return self._pickles._state(self._path)[self._name].detach()


def load(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a pickle by name. Raises ModelError for whatever else it holds."""
    try:
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {named[1]}" if named else "it is no checkpoint of PyTorch"
        raise ModelError(f"{path}: {what}; only tensors are read") from None
    except (FileNotFoundError, PermissionError) as error:
        raise ModelError(f"{path}: can't be read ({error.strerror})") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # The unpickler meets anything in what is no checkpoint.
        if "allocate" in str(error):
            raise MemoryError from None
        text = " ".join(str(error).split())[:200]
        raise ModelError(f"{path}: not a whole checkpoint of PyTorch ({text})") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise ModelError(f"{path}: it holds a {type(state).__name__}, not tensors by name")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise ModelError(f"{path}: {name!r} is a {kind}, not a tensor under a name")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise ModelError(f"{path}: {name} is not a dense tensor")
    return state
