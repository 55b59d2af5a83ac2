"""Which files of a model's folder a server reads."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

#: Beside the weights: settings, tokenizers of every kind, chat templates.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
#: Folders that hold some of them.
SMALL_FOLDERS = ("additional_chat_templates",)
#: Of sentence-transformers, one for each module behind the model: settings, and some have weights.
MODULE_FOLDERS = ("[0-9]_*", "[0-9][0-9]_*")
WEIGHTS = ("*.safetensors",)
#: Pickles, which `tokenpod convert` reads, and a server never.
PICKLES = ("pytorch_model*.bin", "medusa_lm_head.pt", "sparse_linear.pt")
#: Where a downloaded folder came from: the downloader's own, which no server reads.
ORIGIN = "tokenpod-origin.json"
#: Settings of weights that are not read.
_INDEX = "*.index.json"
#: Weights in a second layout, which some publish beside the usual one.
_DOUBLE = ("consolidated*.safetensors",)


def is_small(name: str) -> bool:
    """Whether a server reads the file of this path below the folder, beside the weights."""
    folder, _, last = name.rpartition("/")
    if not _matches(folder, ("", *SMALL_FOLDERS, *MODULE_FOLDERS)) or last.startswith("."):
        return False
    return _matches(last, SMALL_FILES) and not _matches(last, (_INDEX, ORIGIN))


def is_weights(name: str, *, pickles: bool = False) -> bool:
    """Whether a server reads weights from this file; `pickles`: or the converter does."""
    wanted = (*WEIGHTS, *PICKLES) if pickles else WEIGHTS
    if _matches(name, (_INDEX,)):
        return _matches(name.removesuffix(_INDEX[1:]), wanted)
    folder, _, last = name.rpartition("/")
    if folder:
        return _matches(folder, MODULE_FOLDERS) and last == "model.safetensors"
    return _matches(name, wanted) and not _matches(name, _DOUBLE)


def small_files(folder: Path) -> list[str]:
    """Names of the files that a server reads beside the weights, below `folder`, sorted."""
    kinds = (*SMALL_FOLDERS, *MODULE_FOLDERS)
    places = (folder, *(place for kind in kinds for place in folder.glob(kind)))
    found = (path for place in places if place.is_dir() for path in place.iterdir())
    names = (str(path.relative_to(folder)) for path in found if path.is_file())
    return sorted(name for name in names if is_small(name))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
