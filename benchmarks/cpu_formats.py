"""Steps on a CPU with weights, keys and values in fewer bits, paired with float32.

    python -P benchmarks/cpu_formats.py --shape 160m --rounds 15

Random weights; one process holds the model in every format, and in each round every case runs with
each of them, one after the other, so that a busy moment of the machine hits all. What is printed is
the median of a round's ratios to float32 (and the least and largest), and the fastest step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python -P` leaves it out

from step import CPU, SHAPES, config_of, make_batch, random_weights

from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.formats import MADE_AT_LOAD
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.formats.rounding import Number, Rounding
from tokenpod.kernels.pool import KVPool
from tokenpod.kernels.registry import operations_for
from tokenpod.kernels.weight import LinearWeight, QuantisedWeight
from tokenpod.models.decoder import Decoder
from tokenpod.models.linear import Weights
from tokenpod.models.names import Names, weights_of
from tokenpod.models.spec import ModelSpec
from tokenpod.models.weights import HEAD

#: name -> (format of products, format of the head, type of keys and values)
FORMATS = {
    "float32": (None, None, torch.float32),
    "int8": ("int8", None, torch.float32),
    "int8, head too": ("int8", "int8", torch.float32),
    "int8 W8A8, head int8": ("w8a8", "int8", torch.float32),
    "int4, head too": ("int4", "int4", torch.float32),
    "KV int8": (None, None, torch.int8),
    "int8, head too, KV int8": ("int8", "int8", torch.int8),
}


def made(kind: str, weight: torch.Tensor) -> QuantisedWeight:
    if kind == "w8a8":
        plain = Int8Weight.made_of(weight)
        return Int8Weight(plain.numbers, plain.scale, Rounding(Number.INT8))
    return MADE_AT_LOAD[kind].made_of(weight)


def model_of(config: ModelSpec, products: str | None, head: str | None) -> Decoder:
    table: Weights = dict(random_weights(config))
    for weight in weights_of(config, Names(), "model."):
        kind = head if weight.name == HEAD else products if weight.multiplied else None
        dense = table[weight.name]
        if kind is not None and isinstance(dense, torch.Tensor):
            table[weight.name] = LinearWeight((made(kind, dense),))
    return Decoder(config, table, operations_for(CPU, torch.float32))


def seconds(model: Decoder, pool: KVPool, batch: ForwardBatch) -> float:
    began = time.perf_counter()
    model.logits(model.forward(batch, pool)[batch.logit_index])
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="160m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = config_of(options.shape)
    cases = {
        "decode 1 x 128": make_batch(1, 1, 128, 0),
        "decode 16 x 256": make_batch(16, 1, 256, 0),
        "decode 64 x 512": make_batch(64, 1, 512, 0),
        "prompt of 256": make_batch(1, 256, 256, 0),
    }
    layouts = config.kv_layouts
    slots = 64 * 512
    pools = {
        dtype: KVPool(slots=slots, layouts=layouts, dtype=dtype, device=CPU)
        for dtype in (torch.float32, torch.int8)
    }
    for pool in pools.values():
        pool.take_pages()
    models: dict[tuple[str | None, str | None], Decoder] = {}
    for products, head, _ in FORMATS.values():
        if (products, head) not in models:
            models[products, head] = model_of(config, products, head)
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for case, batch in cases.items():
            for name, (products, head, dtype) in FORMATS.items():
                one = seconds(models[products, head], pools[dtype], batch)
                if number:  # the first compiles
                    taken[case, name].append(one)
    print(f"{options.shape}, {options.threads} threads, {options.rounds} rounds")
    for case in cases:
        base = taken[case, "float32"]
        for name in FORMATS:
            own = taken[case, name]
            ratios = [one / other for one, other in zip(base, own, strict=True)]
            print(
                f"{case:16} {name:24} {min(own) * 1e3:8.2f} ms, {statistics.median(ratios):5.2f} x"
                f" float32 ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
