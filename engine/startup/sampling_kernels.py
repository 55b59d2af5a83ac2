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

#: Rows of the draws that are noted: kernels are the same for all numbers of them.
_ROWS = 2


def find_sampling(
    options: EngineOptions, capability: tuple[int, int], found: Callable[[Kernel], object]
) -> None:
    """Call `found` with each, in the order of their first launches.

    With none, if the model's settings do not plainly say what they follow from. From then on this
    process launches no kernels.
    """
    config = json.loads((Path(options.model_folder) / "config.json").read_text())
    config = config.get("text_config", config)
    vocab_size, stored = config.get("vocab_size"), config.get("dtype", config.get("torch_dtype"))
    dtype = getattr(torch, str(options.dtype or stored), None)
    if type(vocab_size) is not int or not isinstance(dtype, torch.dtype):
        return
    meta = torch.device("meta")
    Notes(capability, found).begin()
    sampler = DeviceSampler(
        rows=_ROWS, vocab_size=vocab_size, device=meta, most_edits=options.max_logit_edits + 1
    )
    numbers = torch.empty(_ROWS, dtype=torch.int64, device=meta)
    masks = torch.empty(_ROWS, -(-vocab_size // 32), dtype=torch.int32, device=meta)
    logits = torch.empty(_ROWS, vocab_size, dtype=dtype, device=meta)
    for asked in (Asked(logits, numbers, numbers, each) for each in (None, masks)):
        sampler.launch_all(asked)
