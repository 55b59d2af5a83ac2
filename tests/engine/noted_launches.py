"""What launches on tensors with numbers would compile: `noted_launches.py FOLDER [HOW]`.

In a process of its own, because no kernel runs in it. Prints the keys of Triton's cache: first
those found without weights for Hopper, then those that steps of the loaded model ask for. HOW: a
format of weights, or "deterministic".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tokenpod.core.messages import EngineOptions
from tokenpod.kernels.gpu import launch

HOPPER = launch.Gpu((9, 0), processors=132)
#: The host's tensors are a GPU's, for what is imported from here on.
launch.gpu_of = lambda device: HOPPER  # type: ignore[assignment]

from tokenpod.engine.startup import weightless  # noqa: E402
from tokenpod.engine.startup.assemble import device_executor, make_pool  # noqa: E402
from tokenpod.engine.steps.first_steps import run_worst_steps, warm_up, worst_step  # noqa: E402
from tokenpod.kernels.backends.triton import DETERMINISTIC, OPERATIONS  # noqa: E402
from tokenpod.kernels.gpu.compiling import Kernel, Notes  # noqa: E402
from tokenpod.models.checkpoints.checkpoint import Checkpoint  # noqa: E402
from tokenpod.models.decoders.decoder import Decoder  # noqa: E402
from tokenpod.models.folder import read_layout  # noqa: E402
from tokenpod.models.layers.reading import read_weights  # noqa: E402
from tokenpod.models.pooling.head import PoolingHead  # noqa: E402

CPU = torch.device("cpu")
ROWS, POSITIONS = 40, 256


def launched(options: EngineOptions) -> list[Kernel]:
    """What steps of the model, with its weights, launch."""
    # Nothing is computed, so what is made empty has to be the number of a token.
    torch.empty = torch.zeros  # type: ignore[assignment]
    torch.empty_like = torch.zeros_like  # type: ignore[assignment]
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]
    notes = Notes(HOPPER.capability)
    notes.begin()
    with torch.inference_mode(), Checkpoint(Path(options.model_folder)) as checkpoint:
        layout = read_layout(Path(options.model_folder), checkpoint, quantize=options.quantize)
        weights = read_weights(
            checkpoint,
            layout.weights,
            dtype=torch.bfloat16,
            device=CPU,
            progress=lambda done, total: None,
            reader=layout.reader,
        )
        pooling = None if layout.pooling is None else PoolingHead(layout.pooling)
        ops = DETERMINISTIC if options.deterministic else OPERATIONS
        model, pools = Decoder(layout.spec, weights, ops, pooling=pooling), bool(pooling)
        positions = min(POSITIONS, model.config.max_positions)
        pool = make_pool(model, 8192, CPU)
        pool.reserve(ROWS + 1)
        executor = device_executor(model, options, pool, positions, CPU)
        mutual = model.config.mutual > 0
        run_worst_steps(executor, ROWS, 1200, positions, pools=pools, mutual=mutual)
        if model.captures:
            executor.capture()
        for rows, prompt in ((1, 1), (3, 5), (17, 1), (40, 90), (2, 700), (40, 1100)):
            plan = worst_step(rows, prompt, positions, scattered=rows == 3, pools=pools)
            executor.launch(plan).wait()
            executor.release(range(rows))
        warm_up(executor, [0] * 9, pools=pools)
    return notes.kernels


if __name__ == "__main__":
    how = sys.argv[2] if len(sys.argv) > 2 else None
    told = EngineOptions(
        model_folder=sys.argv[1],
        dtype="bfloat16",
        device="cuda",
        threads=1,
        max_batch_size=ROWS,
        max_batch_prefill_tokens=1200,
        max_total_tokens=POSITIONS,
        quantize=None if how == "deterministic" else how,
        deterministic=how == "deterministic",
    )
    found = {kernel.key for kernel in weightless.find_kernels(told, HOPPER)}
    asked = {kernel.key: kernel.name for kernel in launched(told)}
    print(json.dumps([sorted(found), asked]))
