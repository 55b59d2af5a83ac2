"""One model on two GPUs against the same model on one: agreement, step times, collectives.

    python -P benchmarks/gpu_shards.py                    # nearly everything, under six minutes
    python -P benchmarks/gpu_shards.py --only sums        # sums, decode or agreement
    python -P benchmarks/gpu_shards.py --only products    # tiles for products that end in sums
    python -P benchmarks/gpu_shards.py --layers 4         # a quick look

An 8B Llama shape in bfloat16 with random weights, the same on every rank and in every world. Ranks
are processes. Worlds are one GPU; two, with sums as launches of their own ("apart"); and two as in
service, where products end in their sums. Each world's leader prints as it goes; the comparison
comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import config_of

from tokenpod.core.messages import EngineOptions
from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import PlanRow, StepPlan, plan_of
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.assemble import assemble
from tokenpod.engine.executor import Executor
from tokenpod.engine.join import join_group
from tokenpod.engine.memory import let_segments_grow
from tokenpod.kernels.group import Group
from tokenpod.kernels.parallel import parallel
from tokenpod.kernels.registry import operations_for
from tokenpod.kernels.triton import product
from tokenpod.kernels.triton.launch import capability
from tokenpod.kernels.triton.tiles import Kind, Tile, Tiles, measured
from tokenpod.models.decoder import Decoder
from tokenpod.models.names import Names, weights_of
from tokenpod.models.shard import Shard
from tokenpod.models.spec import ModelSpec

WORLD = 2
#: Names of worlds, and how many ranks they have; what may hang comes last.
WORLDS = {"one": 1, "apart": WORLD, "joined": WORLD}
ROWS, PREFILL, POSITIONS, SLOTS = 64, 512, 1408, 90_112
#: (rows, context) of timed decode steps, and how many are timed.
STEPS, TIMED = ((1, 256), (8, 1024), (64, 1024)), 60
#: Prompts that are scored, and steps of given tokens behind them.
PROMPTS, PROMPT, GIVEN = 4, 512, 48
#: [outputs, inputs] of products that end in sums, and tokens and tiles that they are timed with.
SUMMED = ((4096, 2048), (4096, 7168))
TOKENS = (1, 2, 4, 8, 16, 32)
TILES_OF_ONE = [
    Tile(Kind.MULTIPLY_ADD, block_n, block_k, ahead=ahead)
    for block_n, block_k, ahead in (
        (2, 1024, 2048),
        (4, 512, 2048),
        (4, 1024, 0),
        (4, 1024, 2048),
        (8, 512, 2048),
        (8, 1024, 2048),
        (16, 512, 2048),
    )
]
#: Bytes of sums that are timed.
SUMS = [8192 << i for i in range(10)]
SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}


# -- the model ---------------------------------------------------------------------------------


def make_model(
    config: ModelSpec, group: Group | None, dtype: torch.dtype = torch.bfloat16
) -> Decoder:
    """Every rank draws every weight whole, and keeps its shard."""
    device = torch.device("cuda", torch.cuda.current_device())
    shard = Shard(group.rank, group.world) if group else Shard()
    generator = torch.Generator(device)
    weights = {}
    for number, weight in enumerate(weights_of(config, Names(), "model.")):
        parts = []
        for place, source in enumerate(weight.sources):
            generator.manual_seed(1000 * number + place)
            shape = [axis.length for axis in source.axes]
            whole = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
            whole = whole.mul_(0.02) if len(shape) > 1 else whole.mul_(0.02).add_(1)
            axis = source.divided
            if axis is not None:
                part = shard.part(source.axes[axis])
                whole = whole.narrow(axis, part.start, len(part))
            parts.append(whole.to(dtype))
        weights[weight.name] = torch.cat(parts).contiguous()
    ops = operations_for(device, dtype)
    return Decoder(shard.config(config), weights, parallel(ops, group) if group else ops)


def make_executor(model: Decoder, group: Group | None) -> Executor:
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cuda",
        threads=0,
        max_batch_size=ROWS,
        max_batch_prefill_tokens=PREFILL,
        max_batch_total_tokens=SLOTS,
        max_logit_edits=16,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        return assemble(model, options, positions=POSITIONS, device=device, group=group).executor


def new_row(prompt: list[int]) -> NewRow:
    return NewRow(Request([0], prompt, SamplingParams(), StoppingParams(1), logprobs=True), 0)


# -- agreement ---------------------------------------------------------------------------------


def texts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(10, 128_000, PROMPT + GIVEN).tolist() for _ in range(PROMPTS)]


def say(executor: Executor) -> dict[str, Any]:
    """Log probabilities of prompts, then of the best token after each of given ones."""
    scored: list[float] = []
    for row, tokens in enumerate(texts()):
        first = row * POSITIONS
        slots, prompt = range(first, first + PROMPT), tokens[:PROMPT]
        one = PlanRow(row, 0, slots, prompt, following=prompt[1:], new=new_row(prompt))
        result = executor.launch(plan_of(0, [one])).wait()
        scored += result.scored[0].logprobs.tolist()
    best: list[int] = []
    logprobs: list[float] = []
    for i in range(GIVEN):
        at = PROMPT + i
        rows = [
            PlanRow(row, at, [row * POSITIONS + at], [tokens[at]], output=1 + i)
            for row, tokens in enumerate(texts())
        ]
        result = executor.launch(plan_of(0, rows)).wait()
        best += result.tokens
        logprobs += result.logprobs
    executor.release(range(PROMPTS))
    return {"scored": scored, "best": best, "logprobs": logprobs}


# -- step times --------------------------------------------------------------------------------


def decode_plans(rows: int, context: int, steps: int) -> Iterator[StepPlan]:
    """Steps of one token a row; the rows' context is whatever the pool holds."""
    per_row = SLOTS // ROWS
    new = new_row([7] * (context + 1))
    for i in range(steps):
        # The first step takes the rows, with prompts that are cached but for the last token.
        first: dict[str, Any] = {"tokens": [7], "new": new} if i == 0 else {}
        rows_of = [
            PlanRow(
                row,
                context + i,
                [row * per_row + context + i],
                output=i,
                prefix=range(row * per_row, row * per_row + context),
                **first,
            )
            for row in range(rows)
        ]
        yield plan_of(i, rows_of)


def run_decode(executor: Executor, rows: int, context: int) -> list[float]:
    """Seconds of each step, launched as the engine's loop does: one ahead."""
    previous, times = None, []
    for plan in decode_plans(rows, context, TIMED + 8):
        flight = executor.launch(plan)
        if previous is not None:
            previous.wait()
            times.append(time.perf_counter())
        previous = flight
    assert previous is not None
    previous.wait()
    executor.release(range(rows))
    return [b - a for a, b in itertools.pairwise(times[6:])]


def kernel_times(executor: Executor, rows: int, context: int) -> dict[str, float]:
    """Microseconds a step by kernel; a sum's time includes waiting for the other rank."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run_decode(executor, rows, context)
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("(")[0][-48:]
            times[name] = times.get(name, 0.0) + event.time_range.elapsed_us()
    return {name: spent / (TIMED + 8) for name, spent in times.items()}


def time_decode(executor: Executor, note: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows, context in STEPS:
        name = f"{rows}x{context}"
        with reporting(f"decode {note} {name}"):
            run_decode(executor, rows, context)
            times = run_decode(executor, rows, context)
            found[name] = statistics.median(times) * 1e3
            say_line(f"decode {note:14s} {name:8s} {found[name]:7.3f} ms a step")
            if RANK == 0:
                found[f"{name} kernels"] = kernel_times(executor, rows, context)
            else:
                run_decode(executor, rows, context)
    return found


# -- sums --------------------------------------------------------------------------------------


def check_sums(group: Any) -> None:
    """Random sizes one after the other, in and out of graphs: right, and the same everywhere."""
    draw = np.random.default_rng(1)
    device = torch.device("cuda", torch.cuda.current_device())
    for turn in range(400):
        tokens = int(draw.integers(1, 200))
        torch.manual_seed(turn)
        shares = torch.randn(group.world, tokens, 4096, device=device).bfloat16()
        residual = torch.randn(tokens, 4096, device=device).bfloat16()
        expected = (residual.float() + shares.float().sum(0)).bfloat16()
        got = residual.clone()
        group.add(shares[group.rank].clone(), got)
        if turn % 20 == 0 or turn < 5:
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
            everywhere = group.gather(got.view(1, -1)).view(group.world, -1)
            assert torch.equal(everywhere[0], everywhere[-1]), f"{tokens} tokens differ"
    tokens = torch.arange(7, device=device)
    tokens *= int(group.rank == 0)
    parted = torch.zeros(1, 2, device=device, dtype=torch.bfloat16)
    for _ in range(5):
        group.broadcast(tokens)
        group.sum(parted)  # as in every step: three in a row would overtake their readers
    assert tokens.tolist() == list(range(7)), tokens.tolist()
    say_line("sums of 400 random sizes: right, and the same on all ranks")


def check_products(group: Any) -> None:
    """Random tokens, weights and tiles: bit by bit as apart, in and out of a graph."""
    draw = np.random.default_rng(2)
    device = torch.device("cuda", torch.cuda.current_device())
    table = measured(capability(device))
    torch.manual_seed(group.rank)
    weights = [torch.randn(shape, device=device).mul_(0.02).bfloat16() for shape in SUMMED]
    turns: list[tuple[torch.Tensor, torch.Tensor, Tile]] = []
    for _ in range(300):
        weight = weights[draw.integers(len(weights))]
        tokens = 1 if draw.random() < 0.5 else int(draw.integers(1, 65))
        tile = table.choose_own(*weight.shape, tokens)
        if tokens == 1 and draw.random() < 0.5:
            tile = TILES_OF_ONE[draw.integers(len(TILES_OF_ONE))]
        if tile.kind is Kind.LIBRARY:
            continue
        x = torch.randn(tokens, weight.shape[1], device=device).bfloat16()
        turns.append((x, weight, replace(tile, splits=1)))
    residuals = [torch.ones(len(x), len(w), device=device).bfloat16() for x, w, _ in turns]
    expected = [residual.clone() for residual in residuals]

    def join_all() -> None:
        for (x, weight, tile), residual in zip(turns, residuals, strict=True):
            product.multiply(x, weight, None, residual, tile, buffers=group.buffers)

    def add_all() -> None:
        for (x, weight, tile), residual in zip(turns, expected, strict=True):
            summand = torch.empty_like(residual)
            product.multiply(x, weight, None, summand, tile)
            group.add(summand, residual)

    def compare_all(when: str) -> None:
        for (x, weight, tile), got, apart in zip(turns, residuals, expected, strict=True):
            assert torch.equal(got, apart), f"{when}: {len(x)} tokens, {weight.shape}, {tile}"
            everywhere = group.gather(got.view(1, -1)).view(group.world, -1)
            assert torch.equal(everywhere[0], everywhere[-1]), f"{when}: {len(x)} tokens differ"

    add_all()
    join_all()
    compare_all("launched")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        join_all()
    for replay in range(5):
        graph.replay()
        add_all()
        if replay % 2 == 0:
            join_all()
            add_all()
    compare_all("replayed")
    say_line(f"{len(turns)} products of random sizes end in sums: right, and the same on all ranks")


def time_products(group: Any) -> None:
    """Microseconds of a product and its sum, joined and apart, by tokens and for one by tiles."""
    device = torch.device("cuda", torch.cuda.current_device())
    table = measured(capability(device))
    for n, k in SUMMED:
        # More than the L2 cache holds.
        weights = [torch.randn(n, k, device=device).bfloat16() for _ in range((1 << 28) // (n * k))]
        cases = [(tokens, table.choose(n, k, tokens), table) for tokens in TOKENS]
        cases += [(1, tile, Tiles({}, [(1, tile)])) for tile in TILES_OF_ONE]
        for tokens, tile, tiles in cases:
            x = torch.zeros(tokens, k, device=device, dtype=torch.bfloat16)
            residual = torch.zeros(tokens, n, device=device, dtype=torch.bfloat16)
            name = f"{tile.kind.value} {tile.block_n} x {tile.block_k}, {tile.ahead} ahead"
            found = {}
            for way, buffers in (("apart", None), ("joined", group.buffers)):
                with reporting(f"{way} {n} x {k} {tokens} {name}"):
                    adds = itertools.cycle([_added(w, group, buffers, tiles) for w in weights])
                    act = partial(_next, adds, x, residual)
                    found[way] = graph_seconds(act, times=2 * len(weights)) * 1e6
            cells = "  ".join(f"{way} {each:6.2f} us" for way, each in found.items())
            say_line(f"product {n} x {k}, {tokens:2d} tokens, {name:36s}: {cells}")


def _added(weight: torch.Tensor, group: Any, buffers: Any, tiles: Tiles) -> Any:
    alone = product.prepare_linear(weight, None, tiles)

    def add_product(x: torch.Tensor, residual: torch.Tensor) -> None:
        group.add(alone(x), residual)

    if buffers is None:
        return add_product
    return product.prepare_sum_linear(weight, None, buffers, add_product, tiles)


def _next(adds: Iterator[Any], x: torch.Tensor, residual: torch.Tensor) -> None:
    next(adds)(x, residual)


def graph_seconds(act: Callable[[], None], times: int = 50) -> float:
    """Of one call, from a graph that holds many."""
    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            act()
    samples = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3 / times)
    return statistics.median(samples[1:])


def time_sums(group: Any) -> dict[str, dict[int, float]]:
    """Microseconds of a sum that is added to a residual, by way and by bytes."""
    from torch import distributed

    device = torch.device("cuda", torch.cuda.current_device())
    # Larger than those in use, to see where they stop being the better ones.
    wide = group._symmetric_buffers(SUMS[-1] // 4, device)
    ways: dict[str, Callable[[Any, Any], None]] = {}
    if wide is not None:
        ways["peers"] = wide.add

    def by_nccl(summand: torch.Tensor, residual: torch.Tensor) -> None:
        distributed.all_reduce(summand)
        residual.add_(summand)

    ways["nccl"] = by_nccl
    with reporting("torch's one-shot sum"):
        ways |= one_shot(device)
    found: dict[str, dict[int, float]] = {name: {} for name in ways}
    for size in SUMS:
        summand = torch.ones(size // 8192, 4096, device=device, dtype=torch.bfloat16)
        residual = torch.zeros_like(summand)
        for name, add in ways.items():
            with reporting(f"{name} {size}"):
                found[name][size] = graph_seconds(partial(add, summand, residual)) * 1e6
        cells = "  ".join(f"{name} {found[name].get(size, 0):7.2f} us" for name in ways)
        say_line(f"sum of {size >> 10:5d} KiB: {cells}")
    return found


def one_shot(device: torch.device) -> dict[str, Callable[[Any, Any], None]]:
    """What torch has for it, the copy into symmetric memory included."""
    from torch import distributed
    from torch.distributed import _symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(SUMS[-1] // 2, dtype=torch.bfloat16, device=device)
    everyone: Any = distributed.group.WORLD
    symmetric_memory.rendezvous(memory, everyone)
    name = everyone.group_name

    def add(summand: torch.Tensor, residual: torch.Tensor) -> None:
        mine = memory[: summand.numel()]
        mine.copy_(summand.view(-1))
        residual.add_(torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", name).view_as(residual))

    return {"torch one-shot": add}


# -- ranks -------------------------------------------------------------------------------------


def say_line(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


@contextlib.contextmanager
def reporting(what: str) -> Iterator[None]:
    """One failing case prints its error, and the rest go on. (Its rank's peers may wait for it.)"""
    try:
        yield
    except Exception:
        print(f"FAILED, rank {RANK}: {what}\n{traceback.format_exc(limit=-4)}", flush=True)


RANK = 0


def run_rank(options: argparse.Namespace) -> None:
    global RANK
    RANK = options.rank
    let_segments_grow()
    torch.cuda.set_device(options.rank)
    device = torch.device("cuda", options.rank)
    began = time.perf_counter()
    group = buffers = None
    ranks = WORLDS[options.world]
    if ranks > 1:
        group = join_group(
            options.rank, ranks, "127.0.0.1", options.port, device=device, timeout=60
        )
        reaches = group._broadcasts is not None  # type: ignore[attr-defined]
        say_line(f"joined after {time.perf_counter() - began:.1f} s; reaches peers: {reaches}")
        if options.world == "apart":
            group.buffers = None  # type: ignore[misc]
        buffers = group.buffers
    found: dict[str, Any] = {}
    wanted = options.only or ["sums", "decode", "agreement"]
    with torch.inference_mode():
        if options.world == "apart" and "sums" in wanted:
            with reporting("check of sums"):
                check_sums(group)
            with reporting("times of sums"):
                found["sums"] = time_sums(group)
        if buffers is not None and {"sums", "products"} & set(wanted):
            with reporting("check of products"):
                check_products(group)
        if buffers is not None and "products" in wanted:
            with reporting("times of products"):
                time_products(group)
        keep(options, found)
        if {"decode", "agreement"} & set(wanted):
            run_model(options, group, wanted, found)
    if group is not None:
        group.least(1)
    # Without goodbyes: NCCL would wait for graphs that hold its sums.
    sys.stdout.flush()
    os._exit(0)


def keep(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what there is; what follows may fail."""
    if options.rank == 0:
        Path(options.out).write_text(json.dumps(found))


def run_model(
    options: argparse.Namespace, group: Any, wanted: list[str], found: dict[str, Any]
) -> None:
    config = config_of({**SHAPE, "num_hidden_layers": options.layers})
    began = time.perf_counter()
    model = make_model(config, group)
    torch.cuda.synchronize()
    made = time.perf_counter()
    executor = make_executor(model, group)
    say_line(
        f"world {options.world!r}: weights after {made - began:.1f} s "
        f"({model.weight_bytes / 2**30:.1f} GiB), warm after {time.perf_counter() - made:.1f} s"
    )
    if "agreement" in wanted:
        with reporting("agreement"):
            found["said"] = say(executor)
        keep(options, found)
    if "decode" in wanted:
        found["steps"] = time_decode(executor, options.world)
        keep(options, found)
    if options.world == "apart" and group._broadcasts and "decode" in wanted:
        with reporting("without peers' memory"):
            group._sums = group._broadcasts = None
            slow = make_executor(model, group)
            found["nccl steps"] = time_decode(slow, "NCCL only")
        keep(options, found)
    if group is None and "agreement" in wanted:
        with reporting("float32"):
            del executor, model
            torch.cuda.empty_cache()
            found["exact"] = say(make_executor(make_model(config, None, torch.float32), None))
        keep(options, found)


# -- worlds ------------------------------------------------------------------------------------


def run_world(world: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What its leader found; a world that takes too long is ended."""
    out = folder / f"{world}.json"
    arguments = [sys.executable, "-P", __file__, "--world", world, "--out", str(out)]
    arguments += ["--layers", str(options.layers), "--port", str(options.port)]
    arguments += ["--only", *options.only] if options.only else []
    # Multicast stays off: a fault there can take the whole host's GPUs out of service.
    off = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    ranks = [
        subprocess.Popen([*arguments, "--rank", str(rank)], env={**os.environ, **off})
        for rank in range(WORLDS[world])
    ]
    until = time.monotonic() + options.seconds
    for rank in ranks:
        try:
            rank.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            print(f"FAILED: world {world} took more than {options.seconds} s", flush=True)
            for late in ranks:
                late.kill()
    return json.loads(out.read_text()) if out.exists() else {}


def compare(found: dict[str, dict[str, Any]]) -> None:
    print(f"\n{WORLD} GPUs against one, with sums apart and joined to products")
    steps = {world: each.get("steps", {}) for world, each in found.items()}
    steps["NCCL only"] = found.get("apart", {}).get("nccl steps", {})
    for rows, context in STEPS:
        name = f"{rows}x{context}"
        times = {world: each[name] for world, each in steps.items() if name in each}
        if not times:
            continue
        alone = times.get("one")
        cells = [
            f"{world} {each:7.3f} ms" + (f" ({alone / each:4.2f} x)" if alone else "")
            for world, each in times.items()
        ]
        print(f"  decode {name:8s} {'   '.join(cells)}")
        for world, each in steps.items():
            print_collectives(each, name, world)
    for world in ("apart", "joined"):
        if "said" in found.get("one", {}) and "said" in found.get(world, {}):
            print(f"  {world}:")
            compare_said(found["one"], found[world])


def print_collectives(steps: dict[str, Any], name: str, where: str) -> None:
    kernels = steps.get(f"{name} kernels", {})
    spent = {
        k: v
        for k, v in kernels.items()
        if any(w in k for w in ("_sum_over_ranks", "_tell", "nccl"))
    }
    busy = sum(kernels.values())
    if busy:
        print(
            f"    {where}: collectives {sum(spent.values()):6.1f} of {busy:7.1f} us of kernels "
            f"({sum(spent.values()) / busy:5.1%})"
        )
        for kernel, each in sorted(kernels.items(), key=lambda item: -item[1])[:9]:
            print(f"      {each:8.1f} us  {kernel}")


def compare_said(one: dict[str, Any], many: dict[str, Any]) -> None:
    alone, together = (np.array(said["said"]["scored"]) for said in (one, many))
    print(f"  prompts' log probabilities, {len(alone)} of them, absolute differences:")
    pairs = [("2 GPUs, 1 GPU", together, alone)]
    if "exact" in one:
        truth = np.array(one["exact"]["scored"])
        pairs += [("1 GPU, float32", alone, truth), ("2 GPUs, float32", together, truth)]
    for what, a, b in pairs:
        apart = np.abs(a - b)
        print(
            f"    {what:16s} mean {apart.mean():.4f}  99th of 100 {np.quantile(apart, 0.99):.4f}  "
            f"most {apart.max():.4f}"
        )
    best = [np.array(said["said"]["best"]) for said in (one, many)]
    logprobs = [np.array(said["said"]["logprobs"]) for said in (one, many)]
    same = best[0] == best[1]
    print(
        f"  captured steps of given tokens: {same.mean():.1%} of {len(same)} best tokens agree, "
        f"theirs differ by {np.abs(logprobs[0] - logprobs[1])[same].mean():.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", nargs="*", choices=["sums", "products", "decode", "agreement"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--port", type=int, default=29_517)
    parser.add_argument("--seconds", type=float, default=115, help="most that a world may take")
    parser.add_argument("--worlds", nargs="*", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    began = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in options.worlds:
            if WORLDS[world] > 1 or {"decode", "agreement"} & set(options.only or ["decode"]):
                found[world] = run_world(world, options, Path(folder))
    compare(found)
    print(f"time: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
