"""Which kernels a started engine still compiles, on a GPU: `late_kernels.py FOLDER [FORMAT]`.

In a process of its own, with an empty cache (TRITON_CACHE_DIR). Prints as JSON how many were
compiled ahead, and which the engine's start and the steps behind it had to compile themselves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from triton import knobs

from tokenpod.core.messages import EngineOptions
from tokenpod.engine.run import load
from tokenpod.engine.startup.compile_ahead import CompileAhead
from tokenpod.engine.steps.first_steps import worst_step


class Nobody:
    """A link at whose other end nobody is."""

    def send(self, message: object) -> None:
        """Forget it."""


def main(folder: str, quantize: str | None) -> dict[str, object]:
    """Start, and run steps of many sizes and kinds."""
    options = EngineOptions(
        model_folder=folder,
        dtype="bfloat16",
        device="cuda",
        threads=1,
        max_batch_size=40,
        max_batch_prefill_tokens=3000,
        max_total_tokens=2048,
        max_batch_total_tokens=20_000,
        quantize=quantize,
        speculate=3,
    )
    compiled: list[str] = []

    def note(*, src, cache_hit, **_: object) -> None:  # type: ignore[no-untyped-def]
        if not cache_hit:
            compiled.append(src.name)

    knobs.compilation.listener = note
    ahead = CompileAhead()
    ahead.begin(options)
    executor = load(options, Nobody(), None, ahead)[0].executor  # type: ignore[arg-type]
    start, found = [*compiled], len(list(Path(knobs.cache.dir).glob("*/*.cubin")))
    for rows in (1, 2, 3, 7, 16, 33, 40):
        for prompt in (1, 2, 17, 100, 300, 900, 1500, 2900):
            for drafts in ((0, 0), (2 * rows, 2)):
                plan = worst_step(
                    rows, prompt, 2048, scattered=rows == 3, drafts=drafts, edited=rows == 7
                )
                executor.launch(plan).wait()
                executor.release(range(rows))
    return {"ahead": found - len(start), "start": start, "serving": compiled[len(start) :]}


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)))
