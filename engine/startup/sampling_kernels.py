"""The kernels of sampling, which follow from the vocabulary and the model's type alone.

They take longest to compile, and are found before there is a model, and before what finds the
others has been imported. What is found here is only sooner: `weightless` finds all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from tokenpod.core.messages import EngineOptions
from tokenpod.engine.gpu.device_launches import Asked
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod.kernels.gpu.compiling import Kernel, Notes

META = torch.device("meta")
#: Rows of the draws that are noted: kernels are the same for all numbers of them.
_ROWS = 2
#: Of architectures that generate.
_GENERATE = "ForCausalLM", "ForConditionalGeneration"


def find_sampling(
    options: EngineOptions, capability: tuple[int, int], found: Callable[[Kernel], object]
) -> None:
    """Call `found` with each, in the order of their first launches.

    With none, if the model's files do not plainly say what they follow from. From then on this
    process launches no kernels.
    """
    folder = Path(options.model_folder)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return  # who reads the model says it
    names = config.get("architectures") or [""]
    own = config.get("text_config", config)
    vocab_size, stored = own.get("vocab_size"), own.get("dtype", own.get("torch_dtype"))
    dtype = getattr(torch, str(options.dtype or stored), None)
    generates = str(names[0]).endswith(_GENERATE) and not (folder / "modules.json").exists()
    if generates and type(vocab_size) is int and isinstance(dtype, torch.dtype):
        Notes(capability, found).begin()
        launch_sampling(vocab_size, dtype, options.max_logit_edits + 1)


def launch_sampling(vocab_size: int, dtype: torch.dtype, most_edits: int) -> None:
    """Launch all kernels of sampling on tensors without memory, with masks and without."""
    sampler = DeviceSampler(rows=_ROWS, vocab_size=vocab_size, device=META, most_edits=most_edits)
    numbers = torch.empty(_ROWS, dtype=torch.int64, device=META)
    masks = torch.empty(_ROWS, -(-vocab_size // 32), dtype=torch.int32, device=META)
    logits = torch.empty(_ROWS, vocab_size, dtype=dtype, device=META)
    for each in (None, masks):
        sampler.launch_all(Asked(logits, numbers, numbers, each))
