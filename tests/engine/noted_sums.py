"""Which ranks' sums are found for a model's folder without weights: `noted_sums.py FOLDER WORLD`.

In a process of its own, because no kernel runs in it. Prints [name, rank] of each kernel that has
a rank.
"""

from __future__ import annotations

import json
import sys

from tokenpod.core.messages import EngineOptions
from tokenpod.core.placement import Placement
from tokenpod.engine.startup.weightless import find_kernels
from tokenpod.kernels.gpu.launch import Gpu

if __name__ == "__main__":
    world = int(sys.argv[2])
    place = Placement(0, world, 0, "", "", 0, "", secret="of one pod")
    options = EngineOptions(
        model_folder=sys.argv[1],
        dtype="bfloat16",
        device="cuda",
        threads=0,
        max_batch_size=8,
        max_batch_prefill_tokens=100,
        placement=place,
    )
    found = []
    for kernel in find_kernels(options, Gpu((9, 0), processors=132)):
        names = kernel.source.fn.arg_names
        constants = {names[at[0]]: value for at, value in kernel.source.constants.items()}
        if constants.get("WORLD", 1) > 1:
            found.append([kernel.name, constants["RANK"]])
    print(json.dumps(found))
