"""The weights of transformers' models: read by our reader, put in their places by transformers.

transformers knows which tensors a class has, how older files name and cut them, and which are tied;
our reader knows which files may be read, and how. What does not fit is found before anything is
read, with tensors that have shapes and no numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.utils import logging

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.nested import TextTensors
from tokenpod.models.layers.reading import Progress


def load_weights(
    found: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: TextTensors,
    dtype: torch.dtype,
    progress: Progress,
) -> Any:
    """The model with its weights, on a CPU.

    Raises ModelError as `checkpoint.check` does, before weights are read unless a class can't be
    filled without numbers.
    """
    # As config.json calls it.
    name = next(iter(config.architectures or ()), found.__name__)
    library: Any = logging
    library.disable_progress_bar()
    library.set_verbosity_error()  # what is missing is an error of ours
    with suppress(_NoNumbers):
        _check_fit(name, tensors, _fit(found, config, tensors, dtype))
    counted = _Counted(tensors, progress)
    try:
        model, loading_info = cast(Any, found).from_pretrained(
            None,
            config=config,
            state_dict={name: _Stored(counted.read, name) for name in tensors.names},
            dtype=dtype,
            ignore_mismatched_sizes=True,  # loading_info by us
            output_loading_info=True,
        )
    except RuntimeError as error:
        raise ModelError(f"{name}: {' '.join(str(error).split())[:300]}") from None
    _check_fit(name, tensors, loading_info)
    counted.finish()
    return model.eval().requires_grad_(False)


class _NoNumbers(Exception):
    """A class needs its weights' numbers to be filled."""


def _fit(
    found: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: TextTensors,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What `from_pretrained` says of tensors, by their names and shapes alone.

    It would say so itself of a model on the meta device, but asks for accelerate first.
    """
    own, owner = copy(config), cast(Any, found)
    own.dtype = dtype
    meta = torch.device("meta")
    try:
        # Not above: other releases may have it elsewhere.
        from transformers.conversion_mapping import get_model_conversion_mapping

        with meta:
            model = owner(own)
        loading = modeling_utils.LoadStateDictConfig(
            ignore_mismatched_sizes=True,
            device_map={"": meta},
            dtype=dtype,
            weight_mapping=cast(Any, get_model_conversion_mapping)(model, None, None),
        )
        stored = {name: _Stored(tensors.outline, name) for name in tensors.names}
        loading_info, _ = owner._load_pretrained_model(model, stored, None, loading)
        return cast(
            "dict[str, Any]", owner._finalize_model_loading(model, loading, loading_info).to_dict()
        )
    except Exception as error:  # whatever a class does without numbers
        raise _NoNumbers from error


def _check_fit(name: str, tensors: TextTensors, loading_info: dict[str, Any]) -> None:
    """Raise ModelError for what is missing, left over, or of another shape."""
    for kind, what in (
        ("missing_keys", "is missing from the checkpoint"),
        ("mismatched_keys", "has another shape than config.json says"),
    ):
        if loading_info[kind]:
            raise ModelError(f"tensor {_some(tensors, loading_info[kind])} {what}")
    if loading_info["unexpected_keys"]:
        raise ModelError(
            f"{name} has no tensor {_some(tensors, loading_info['unexpected_keys'])}: "
            "config.json and weights don't belong together"
        )


class _Counted:
    """Tensors whose reads are counted, one at a time: transformers reads in threads."""

    def __init__(self, tensors: TextTensors, progress: Progress) -> None:
        self._tensors, self._progress = tensors, progress
        self._lock = threading.Lock()
        self._total = sum(map(tensors.size, tensors.names))
        self._done = 0
        progress(0, self._total)

    def read(self, name: str) -> torch.Tensor:
        """A tensor that is no view of its file."""
        with self._lock:
            tensor = self._tensors.read(name)
            self._done += self._tensors.size(name)
            self._progress(self._done, self._total)
        return tensor

    def finish(self) -> None:
        """What is not needed is not read."""
        self._progress(self._total, self._total)


class _Stored:
    """A tensor that transformers has not asked for yet: it does by `stored[...]`."""

    def __init__(self, read: Callable[[str], torch.Tensor], name: str) -> None:
        self._read, self._name = read, name

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read(self._name)[index]


def _some(tensors: TextTensors, names: Any) -> str:
    """As the checkpoint calls them."""
    found = (name if isinstance(name, str) else str(name[0]) for name in names)
    shown = sorted(map(tensors.stored, found))
    more = f" (and {len(shown) - 3} more)" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + more
