"""The engine in process: decode, mixed and prompt steps and a workload's cases, beside the limits.

On a GPU the shape of an 8B Llama in bf16, on a CPU that of 15 million parameters in float32, with
random weights, greedy, end of sequence ignored. Limits: products of prompts at the matrix rate,
then the bytes of decode at the read bandwidth, not overlapped; they are of a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import limits, loads
from benchmarks.support.engine import GREEDY, Bench, Client, Compilations, Engine
from benchmarks.support.models import config_of, first_layers, random_model, shape_names, shape_of
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE, profiled, synchronise
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.startup.memory import let_segments_grow
from tokenpod.models.specs.spec import ModelSpec

GPU = DEVICE.type == "cuda"
SMOKE = {
    "cpu": "--shape tiny --decode 1x64 4x64 --prompts 64 --rows 8 --mixed 4+16",
    "gpu": "--shape tiny --decode 1x64 4x64 --prompts 64 --rows 8 --positions 2048 --mixed 4+32 "
    "--profile 4 --requests 4 --longest 32 --quantize int4",
}
SAMPLED = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9, presence_penalty=0.5, seed=1)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=shape_names(), default="llama-3.1-8b" if GPU else "15m")
    parser.add_argument("--layers", type=int, default=0, help="the first of the shape; 0: all")
    parser.add_argument(
        "--workload", type=Path, help="its cases, too; and its shape, if it has one"
    )
    parser.add_argument("--cases", nargs="*", help="of the workload; default: all")
    parser.add_argument("--requests", type=int, default=0, help="of drawn cases: chat, uneven, one")
    parser.add_argument("--longest", type=int, default=1024, help="prompt and output of those")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=512 if GPU else 64, help="largest batch")
    parser.add_argument("--prefill", type=int, default=4096 if GPU else 512, metavar="TOKENS")
    parser.add_argument("--positions", type=int, default=36_864 if GPU else 1024)
    parser.add_argument("--slots", type=int, default=None if GPU else 32_768, help="of KV")
    parser.add_argument("--kv-cache-dtype", default="auto", help="limits stay those of auto")
    parser.add_argument("--quantize", default="none", choices=["none", "int8", "fp8", "int4"])
    parser.add_argument("--quantize-head", action="store_true")
    decode = ["1x256", "64x1024", "16x8192", "256x512"] if GPU else ["1x128", "16x256", "48x256"]
    parser.add_argument("--decode", nargs="*", default=decode, metavar="ROWSxCONTEXT")
    parser.add_argument("--mixed", nargs="*", default=["200+128"] if GPU else [])
    parser.add_argument("--prompts", nargs="*", type=int, default=[2048, 8192] if GPU else [256])
    parser.add_argument("--sampled", action="store_true", help="temperature, top_p and a penalty")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU's engine")
    parser.add_argument("--profile", type=int, default=0, help="decode turns to profile on a GPU")


def run(asked: argparse.Namespace, report: Report) -> None:
    shape, cases = shape_and_cases(asked)
    compiled = Compilations() if GPU else None
    engine = make(asked, shape)
    report.note(f"engine warm after {engine.warm_s:.1f} s; {engine.made.slots:,} KV slots")
    client = Client()
    bench = Bench(engine.loop(client), client, engine.vocabulary)
    config = config_of(shape)
    for spec in asked.decode:
        decode(bench, *map(int, spec.split("x")), asked, config, report)
    for spec in asked.mixed:
        mixed(bench, *map(int, spec.split("+")), report)
    for tokens in asked.prompts:
        prompt(bench, tokens, asked, config, report)
    for name, lengths in cases.items():
        case(bench, name, lengths, asked, report, compiled)


def shape_and_cases(asked: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shape, and (prompt, output) lengths by case."""
    shape, cases = first_layers(shape_of(asked.shape), asked.layers), {}
    if asked.workload:
        cases, own = loads.workload_cases(asked.workload)
        shape = own or shape
        wanted = asked.cases or list(cases)
        cases = {name: cases[name] for name in wanted}
    if asked.requests:
        for name in ("chat", "uneven"):
            drawn = loads.SHAPES[name](asked.requests, asked.longest)
            cases[name] = [(prompt, new) for prompt, new, _ in drawn]
        cases["one"] = [(asked.longest // 4, asked.longest // 4)]
    return shape, cases


def make(asked: argparse.Namespace, shape: dict[str, Any]) -> Engine:
    """The engine that is asked for."""
    torch.set_num_threads(asked.threads)
    if GPU:
        let_segments_grow()
    formats = {"quantize": asked.quantize, "quantize_head": asked.quantize_head}
    model = random_model(shape, DEVICE, torch.bfloat16 if GPU else torch.float32, **formats)
    return Engine(
        model,
        DEVICE,
        rows=asked.rows,
        positions=asked.positions,
        prefill=asked.prefill,
        kv_cache_dtype=asked.kv_cache_dtype,
        max_batch_total_tokens=asked.slots,
        max_total_tokens=asked.positions,
    )


def sampling(asked: argparse.Namespace) -> SamplingParams:
    """Of all requests."""
    return SAMPLED if asked.sampled else GREEDY


def decode(
    bench: Bench, rows: int, context: int, asked: Any, config: ModelSpec, report: Report
) -> float:
    """Steps in which `rows` rows decode around `context`; a profile says when the GPU waits.

    Returns seconds of a step.
    """
    steps, joining = 64 + asked.profile, rows * context // asked.prefill
    bench.run([(16, 2)])
    for _ in range(rows):
        prompt = max(context - joining - steps // 2, 16)
        bench.ask(prompt, steps + joining + 8, sampling(asked))
    arrivals = bench.client.arrivals
    arrivals.clear()
    bench.turn_until(lambda: len(arrivals) >= 4 and arrivals[-1][1] == rows)
    synchronise()
    idle, top = None, []
    if asked.profile and GPU:
        busy, top = profiled(lambda: [bench.loop.turn() for _ in range(asked.profile)])
        idle = 1 - busy
    seen, used, began = len(arrivals), time.process_time(), time.perf_counter()
    turns = bench.turn_until(lambda: not bench.client.left)
    used, took = time.process_time() - used, time.perf_counter() - began
    gaps = [b[0] - a[0] for a, b in zip(arrivals[seen:], arrivals[seen + 1 :], strict=False)
            if b[1] == rows]  # fmt: skip
    step = statistics.median(gaps)
    size = limits.decode_bytes(config, rows, context, asked.quantize, head=asked.quantize_head)
    cells: dict[str, Any] = {"rows": rows, "context": context, "step_ms": 1e3 * step}
    if GPU:
        limit = size / limits.BANDWIDTH
        cells |= {"limit_ms": 1e3 * limit, "limit_share": limit / step, "GPU_idle_share": idle}
    else:
        cells |= {"processor_ms": 1e3 * used / turns, "read_GB/s": size * 2 / step / 1e9}
        cells |= {"turns_ms": 1e3 * took / turns}
    report.row("decode", **cells)
    for name, microseconds in top[:12]:
        print(f"    {microseconds / asked.profile:9.1f} us a step  {name}")
    return step


def mixed(bench: Bench, rows: int, chunk: int, report: Report) -> None:
    """Turns of `rows` decoding rows and a prompt of `chunk` tokens."""
    for _ in range(rows):
        bench.ask(min(64, chunk), 4 * 24 + rows)
    arrivals = bench.client.arrivals
    arrivals.clear()
    bench.turn_until(lambda: bool(arrivals) and arrivals[-1][1] >= rows - 1)
    seconds, used = [], []
    with torch.inference_mode():
        for _ in range(24):
            bench.ask(chunk, 1)
            began, busy = time.perf_counter(), time.thread_time()
            bench.loop.turn()
            seconds.append(1e3 * (time.perf_counter() - began))
            used.append(1e3 * (time.thread_time() - busy))
    report.row(
        "mixed",
        rows=rows,
        prompt_tokens=chunk,
        turn_ms=statistics.median(seconds[4:]),
        loop_thread_ms=statistics.median(used[4:]),
    )
    bench.turn_until(lambda: not bench.client.left)


def prompt(bench: Bench, tokens: int, asked: Any, config: ModelSpec, report: Report) -> float:
    """One prompt, computed as a server does, in steps of at most --prefill tokens; its seconds."""
    bench.run([(tokens, 1)])
    seconds = min(bench.run([(tokens, 1)]).seconds for _ in range(4))
    rate = limits.prefill_operations(config, tokens) / seconds
    cells = {"tokens": tokens, "ms": 1e3 * seconds, "TFLOP/s": rate / 1e12}
    if GPU:
        cells["limit_share"] = rate / limits.MATRIX_RATE / limits.RATE.get(asked.quantize, 1.0)
    report.row("prompt", **cells)
    return seconds


def case(
    bench: Bench,
    name: str,
    lengths: list[tuple[int, int]],
    asked: Any,
    report: Report,
    compiled: Compilations | None,
) -> None:
    """All requests of a case at once."""
    output = sum(new for _, new in lengths)
    before = len(compiled.names) if compiled else 0
    grown = torch.cuda.memory_stats()["num_device_alloc"] if GPU else 0
    for _ in range(asked.rounds):
        took = bench.run(lengths, sampling(asked))
        cells: dict[str, Any] = {"case": name, "seconds": took.seconds}
        cells |= {"output_tokens/s": output / took.seconds, "turns": took.turns}
        cells |= {"median_gap_ms": 1e3 * statistics.median(bench.client.gaps())}
        cells |= {"processor_ms_a_turn": 1e3 * took.processor / took.turns}
        if GPU:
            limit = limits.limit_seconds(config_of(shape_and_cases(asked)[0]), lengths, asked.rows)
            cells |= {"limit_s": limit, "limit_share": limit / took.seconds}
            cells |= {"device_allocations": torch.cuda.memory_stats()["num_device_alloc"] - grown}
            cells |= {"kernels_compiled": len(compiled.names) - before if compiled else 0}
        report.row("cases", **cells)
