"""Products of few tokens with weights of 8 bits on a GPU, beside what products of 16 bits take.

    python -P benchmarks/gpu_int8.py [--search]

Checks the kernel against float64 first, at the sizes that are timed. Then prints, for each shape
and number of tokens, microseconds and the share of the read bandwidth of: our product of 16 bits,
the kernel with its own tile, and the library with a float copy of the weight. `--search` tries many
tiles and prints the best; a tile that is better everywhere belongs into kernels/triton/int8.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch

from tokenpod.kernels.formats.int8 import Int8Weight, multiply_widened
from tokenpod.kernels.triton import product
from tokenpod.kernels.triton.int8 import Int8Tile, multiply_int8

#: Bytes a second that an H200 reads, as benchmarks/gpu.py measured them.
READ_RATE = 4.617e12
#: (outputs, inputs) of an 8B Llama's products.
SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64)
#: Together larger than the L2 cache, so that every weight is read from memory.
ROTATED_BYTES = 256 << 20
REPLAYS = 20
#: Of a result, in bfloat16.
TOLERANCE = 8e-3

Product = Callable[[torch.Tensor], torch.Tensor]


def seconds(products: list[Product], x: torch.Tensor) -> float:
    """Of one product: the least of several replays of all, captured one behind the other."""
    for each in products:
        each(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in products:
            each(x)
    times = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times) / len(products)


def eight_bits(weights: list[Int8Weight], tile: Int8Tile) -> list[Product]:
    def made(weight: Int8Weight) -> Product:
        return lambda x: multiply_int8(x, weight, None, None, tile)

    return [made(weight) for weight in weights]


def widened(weights: list[Int8Weight]) -> list[Product]:
    def made(weight: Int8Weight) -> Product:
        return lambda x: multiply_widened(x, weight, None)

    return [made(weight) for weight in weights]


def check(weight: Int8Weight, tokens: int, k: int) -> None:
    """Against float64; SystemExit if it is wrong."""
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ weight.dequantised(torch.float64).t()
    got = multiply_int8(x, weight, None, None, Int8Tile()).double()
    error = ((got - exact).norm() / exact.norm()).item()
    if not error < TOLERANCE:
        raise SystemExit(f"{tokens} tokens, weight {list(weight.shape)}: error {error:.1e}")


def tiles() -> list[Int8Tile]:
    return [
        Int8Tile(block_n, block_k, warps, stages)
        for block_n, block_k, warps, stages in itertools.product(
            (16, 32, 64), (128, 256, 512), (2, 4, 8), (2, 3, 4, 5)
        )
        if block_n * block_k * stages <= 128 << 10
    ]


def best_tile(weights: list[Int8Weight], x: torch.Tensor) -> tuple[Int8Tile, float]:
    timed = []
    for tile in tiles():
        try:
            timed.append((seconds(eight_bits(weights, tile), x), tile))
        except Exception as error:  # a tile that asks for more than the device has
            print(f"    {tile}: {str(error)[:80]}")
    least, tile = min(timed, key=lambda pair: pair[0])
    return tile, least


def run(name: str, n: int, k: int, *, search: bool) -> None:
    count = max(ROTATED_BYTES // (n * k), 2)
    drawn = torch.randn(n, k, device="cuda") * k**-0.5
    weights = [Int8Weight.made_of(drawn.roll(i, 0)) for i in range(count)]
    dense = [drawn.roll(i, 0).bfloat16() for i in range(max(count // 2, 2))]
    for tokens in TOKENS:
        check(weights[0], tokens, k)
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
        ways = {
            "16 bits": (2 * n * k, seconds([product.prepare_linear(w, None) for w in dense], x)),
            "8 bits": (n * k, seconds(eight_bits(weights, Int8Tile()), x)),
            "float copy": (n * k, seconds(widened(weights), x)),
        }
        told = "  ".join(
            f"{way} {taken * 1e6:7.1f} us {read / READ_RATE / taken:4.0%}"
            for way, (read, taken) in ways.items()
        )
        print(f"{name:8s} {tokens:3d} tokens  {told}", flush=True)
        if search:
            tile, taken = best_tile(weights, x)
            print(f"    best {taken * 1e6:7.1f} us {n * k / READ_RATE / taken:4.0%}  {tile}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", action="store_true", help="try many tiles")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, (n, k) in SHAPES.items():
            run(name, n, k, search=options.search)


if __name__ == "__main__":
    main()
