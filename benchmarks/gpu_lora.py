"""Time decode steps with LoRA adapters on a GPU: what they cost, and which tiles are best.

    python -P benchmarks/gpu_lora.py                    # each case, with the tiles that serving has
    python -P benchmarks/gpu_lora.py --search           # and with other tiles
    python -P benchmarks/gpu_lora.py --rank 64 --slots 8

The decoder of an 8B Llama shape in bfloat16, as in gpu_decode_step.py, captured in a graph: without
adapters, with slots of which no row has any, and with adapters on all products. Before that, on one
case, the kernels' result is compared with the reference's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_decode_step import Stage, config, make_batch, make_stage

from tokenpod.kernels import reference
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.triton import OPERATIONS, adapters
from tokenpod.kernels.triton.adapters import Tiles
from tokenpod.models.adapters.files import Base
from tokenpod.models.adapters.store import AdapterStore, Space
from tokenpod.models.adapters.targets import Targets, products_of
from tokenpod.models.decoder import Decoder
from tokenpod.models.names import Names, weights_of
from tokenpod.models.shard import WHOLE

#: Rows, context, and different adapters among the rows.
CASES = ((64, 1024, 32), (64, 1024, 1), (16, 1024, 16), (1, 1024, 1))
REPLAYS = 24
#: Of log probabilities, by rounding alone, after 32 layers in bfloat16.
TOLERANCE = 0.15

SEARCHED = [
    Tiles(tokens, inputs, splits, outputs, warps)
    for tokens in (16, 32)
    for inputs in (128, 256)
    for splits in (2, 4, 8, 16)
    for outputs in (64, 128, 256)
    for warps in (2, 4)
]


def make_store(slots: int, rank: int) -> AdapterStore:
    """Full of random adapters, whose products are small beside the base's."""
    products = products_of(weights_of(config(), Names(), "model."), WHOLE)
    named = {product.name: product for product in products}
    base = Base(Targets("a benchmark's"), named, WHOLE, torch.bfloat16, rank)
    store = AdapterStore(base, Space(slots, rank), OPERATIONS, torch.device("cuda"))
    store._slots.normal_(std=0.02)
    store._ranks.fill_(rank)
    return store


def step_seconds(decoder: Decoder, batch: ForwardBatch, stage: Stage) -> float:
    """Of a captured step, the median of replays one by one."""

    def run() -> torch.Tensor:
        return decoder.logits(decoder.forward(batch, stage.pool))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


@contextmanager
def cut(tiles: Tiles | None) -> Iterator[None]:
    """All steps have these tiles; None: those of serving."""
    before = adapters.TILES
    adapters.TILES = before if tiles is None else ((1 << 31, tiles),)
    try:
        yield
    finally:
        adapters.TILES = before


def with_adapters(batch: ForwardBatch, rows: int, count: int) -> ForwardBatch:
    return replace(batch, t_adapter=torch.arange(rows, device="cuda") % count + 1)


def compare(stage: Stage, store: AdapterStore) -> None:
    """With the reference's arithmetic of adapters; the rest of the step is the same."""
    batch = with_adapters(make_batch(16, 1024), 16, min(store._slots.shape[0], 5))
    found = []
    for ops in (OPERATIONS, reference.OPERATIONS):
        store._ops = replace(OPERATIONS, plan_adapters=ops.plan_adapters, adapt=ops.adapt)
        decoder = Decoder(config(), dict(stage.weights), OPERATIONS, adapters=store)
        logits = decoder.logits(decoder.forward(batch, stage.pool))
        found.append(logits.float().log_softmax(-1))
    store._ops = OPERATIONS
    difference = (found[0] - found[1]).abs()
    print(f"kernels and reference differ by {difference.mean():.4f} in the mean", flush=True)
    assert difference.mean() < TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--search", action="store_true", help="try other tiles")
    options = parser.parse_args()
    with torch.inference_mode():
        stage, store = make_stage(), make_store(options.slots, options.rank)
        compare(stage, store)
        plain = Decoder(config(), dict(stage.weights), OPERATIONS)
        adapted = Decoder(config(), dict(stage.weights), OPERATIONS, adapters=store)
        for rows, context, count in CASES:
            batch = make_batch(rows, context)
            own = with_adapters(batch, rows, min(count, options.slots))
            base, unused = (step_seconds(each, batch, stage) for each in (plain, adapted))
            print(f"{rows} x {context}: {base * 1e3:.3f} ms; slots unused {unused * 1e3:.3f} ms")
            found = []
            for tiles in [None, *(SEARCHED if options.search else [])]:
                with cut(tiles):
                    try:
                        seconds = step_seconds(adapted, own, stage)
                    except Exception as error:
                        print(f"  {tiles}: {error}")
                        continue
                found.append((seconds, str(tiles or adapters.tiles_for(rows))))
            for seconds, name in [found[0], *sorted(found[1:])[:5]]:
                rate = f"{base / seconds:.3f} of the rate"
                print(f"  {count} adapters: {seconds * 1e3:.3f} ms, {rate}, {name}", flush=True)


if __name__ == "__main__":
    main()
