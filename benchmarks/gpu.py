"""The engine in process on a GPU: the workload's cases, each beside what the hardware allows.

    python -P benchmarks/gpu.py --workload gpu-workload.json
    python -P benchmarks/gpu.py --workload gpu-workload.json --cases latency --profile 40

    python -P benchmarks/gpu.py --shape gpt-oss-20b --decode 1x256 64x1024 --mixed --prompts 8192

A shape (the workload's, or one of shapes.json) with random bf16 weights, greedy, end of sequence
ignored. Limits: prefill's products at the matrix rate, then decode's bytes at the read bandwidth,
not overlapped. Of experts a step reads those that its rows choose, evenly at random.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import itertools
import json
import math
import pstats
import random
import statistics
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def _find_tokenpod() -> None:
    """Make the folders importable as `tokenpod` in a checkout that is not installed."""
    try:
        import tokenpod.engine  # noqa: F401
    except ImportError:
        package = types.ModuleType("tokenpod")
        package.__path__ = [str(ROOT), str(ROOT / "tokenpod")]  # type: ignore[attr-defined]
        sys.modules["tokenpod"] = package


_find_tokenpod()


from tokenpod.core.messages import EngineOptions  # noqa: E402
from tokenpod.core.outputs import StepOutputs  # noqa: E402
from tokenpod.core.plan import StepPlan  # noqa: E402
from tokenpod.core.requests import Request, StoppingParams  # noqa: E402
from tokenpod.core.sampling import SamplingParams  # noqa: E402
from tokenpod.engine.assemble import assemble  # noqa: E402
from tokenpod.engine.executor import Executor, Launched, StepResult  # noqa: E402
from tokenpod.engine.loop import EngineLoop  # noqa: E402
from tokenpod.engine.memory import let_segments_grow  # noqa: E402
from tokenpod.kernels.formats import MADE_AT_LOAD  # noqa: E402
from tokenpod.kernels.registry import operations_for  # noqa: E402
from tokenpod.kernels.weight import LinearWeight  # noqa: E402
from tokenpod.models.decoder import Decoder  # noqa: E402
from tokenpod.models.families import FAMILIES, Family  # noqa: E402
from tokenpod.models.fields import Fields  # noqa: E402
from tokenpod.models.layer_spec import Experts, Latent, LayerSpec  # noqa: E402
from tokenpod.models.names import Names, weights_of  # noqa: E402
from tokenpod.models.spec import ModelSpec  # noqa: E402
from tokenpod.scheduler.scheduler import Limits, Scheduler  # noqa: E402

#: Measured on an H200: bytes a second read, bf16 operations a second.
BANDWIDTH, MATRIX_RATE = 4.617e12, 687e12

Lengths = list[tuple[int, int]]


def family_of(model: dict[str, Any]) -> Family:
    return next(f for f in FAMILIES if model["architectures"][0] in f.architectures)


def config_of(model: dict[str, Any]) -> ModelSpec:
    told = {"torch_dtype": "bfloat16"}
    return family_of(model).spec(Fields({**told, **model}, "a benchmark's"), None)


def random_model(
    family: Family,
    config: ModelSpec,
    device: torch.device,
    options: argparse.Namespace | None = None,
    change: Callable[[dict[str, torch.Tensor | LinearWeight]], None] = lambda weights: None,
) -> Decoder:
    """Random weights, quantised as `options` say, which `change` may alter."""
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor | LinearWeight] = {}
    quantised = MADE_AT_LOAD.get(options.quantize) if options else None
    for weight in weights_of(config, family.names_of(config)[0], ""):
        dtype = weight.dtype or torch.bfloat16
        # A token's own features outweigh what layers add: else routers send all rows one way.
        spread = 8 if weight.name == "embedding" else 0.02
        made = torch.empty(weight.shape, device=device, dtype=dtype).normal_(0, spread)
        if weight.experts:
            made = made.view(weight.experts, -1, *weight.shape[1:])
        weights[weight.name] = made if made.ndim > 1 else made.add_(1)
        head = options is not None and weight.name == "head" and options.quantize_head
        if quantised is not None and (weight.multiplied or head):
            weights[weight.name] = LinearWeight((quantised.made_of(made),))
    change(weights)
    return Decoder(config, weights, operations_for(device, torch.bfloat16))


class Compilations:
    """Counts kernels that Triton compiles."""

    def __init__(self) -> None:
        import triton

        self.names: list[str] = []
        triton.knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *args: Any, **kwargs: Any) -> None:
        self.names.append(str(kwargs.get("repr", "?"))[:80])


class Client:
    """The other end of the engine's link: hands requests in, times what comes out."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        #: (when, tokens) of each message that brought any.
        self.arrivals: list[tuple[float, int]] = []
        self.left = 0

    def receive(self, seconds: float | None) -> list[Request]:
        del seconds
        requests, self.requests = self.requests, []
        return requests

    def send(self, message: object) -> None:
        assert isinstance(message, StepOutputs)
        assert not message.failures, message.failures[0]
        if message.sequence_ids:
            self.arrivals.append((time.perf_counter(), len(message.sequence_ids)))
            self.left -= sum(finish != 0 for finish in message.finishes)


@dataclass
class Bench:
    """An engine and its client."""

    config: ModelSpec
    loop: EngineLoop
    client: Client
    compilations: Compilations
    next_id: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(3))

    def run(self, lengths: Lengths, profiled: range = range(0)) -> float:
        """Seconds for all of them at once; of the turns `profiled` a profile is printed."""
        for prompt, output in lengths:
            _submit(self, prompt, output)
        self.client.left = len(lengths)
        self.client.arrivals.clear()
        began, turn = time.perf_counter(), 0
        while self.client.left:
            if profiled and turn == profiled.start:
                busy = profile(self, len(profiled))
                print(f"    turns {profiled}: GPU idle {1 - busy:5.1%}", flush=True)
            self.loop.turn()
            turn += 1
        torch.cuda.synchronize()
        return time.perf_counter() - began


class StepTimes:
    """An executor between the loop and another one: where the time goes, by kind of step."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ended = 0.0
        #: (kind, tokens of a step rounded up) -> seconds of each.
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def launch(self, plan: StepPlan) -> Launched:
        """As the other one's; a step lasts from the end of the one before to its own."""
        tokens = plan.tokens
        kind = "decode" if tokens == plan.rows else "mixed"
        flight = self._executor.launch(plan)

        def wait() -> StepResult:
            result = flight.wait()
            now = time.perf_counter()
            if self._ended:
                self.seconds[kind, -(-tokens // 64) * 64].append(now - self._ended)
            self._ended = now
            return result

        return types.SimpleNamespace(wait=wait)

    def release(self, rows: Sequence[int]) -> None:
        """As the other one's."""
        self._executor.release(rows)

    def report(self) -> None:
        """Print and forget."""
        for (kind, tokens), seconds in sorted(self.seconds.items()):
            print(
                f"    {kind:6} <= {tokens:5} tokens: {len(seconds):5} steps, "
                f"{sum(seconds):7.3f} s, median {statistics.median(seconds) * 1e3:7.2f} ms",
                flush=True,
            )
        self.seconds.clear()
        self._ended = 0.0


def make_bench(model: dict[str, Any], options: argparse.Namespace) -> Bench:
    device = torch.device("cuda")
    let_segments_grow()
    family, config = family_of(model), config_of(model)
    compilations = Compilations()
    began = time.perf_counter()
    decoder = random_model(family, config, device, options)
    torch.cuda.synchronize()
    made = time.perf_counter()
    engine = EngineOptions(
        model_folder="",
        dtype=None,
        device="cuda",
        threads=0,
        max_batch_size=options.rows,
        max_batch_prefill_tokens=options.prefill,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    with torch.inference_mode():
        ready = assemble(decoder, engine, positions=options.positions, device=device)
    limits = Limits(
        slots=ready.slots,
        max_rows=options.rows,
        max_positions=options.positions,
        prefill_tokens=options.prefill,
    )
    client = Client()
    scheduler = Scheduler(limits)
    executor = StepTimes(ready.executor) if options.steps else ready.executor
    loop = EngineLoop(client, scheduler, executor, overlap=ready.overlap)  # type: ignore[arg-type]
    print(
        f"weights made in {made - began:.1f} s, engine warm "
        f"after {time.perf_counter() - made:.1f} s; "
        f"{ready.slots:,} slots; {torch.cuda.memory_reserved() / 2**30:.1f} GiB reserved",
        flush=True,
    )
    return Bench(config, loop, client, compilations)


# -- limits ------------------------------------------------------------------------------------


def multiplied(config: ModelSpec, rows: float) -> float:
    """Numbers of the layers' products that a step of so many rows reads."""
    numbers = 0.0
    for weight in weights_of(config, family_names(config), ""):
        if len(weight.shape) < 2 or not weight.name[0].isdigit():
            continue
        layer = config.layers[int(weight.name.partition(".")[0])]
        share = 1.0
        if weight.experts:
            assert isinstance(layer.mlp, Experts)
            share = 1 - (1 - layer.mlp.routing.per_token / layer.mlp.count) ** rows
        numbers += math.prod(weight.shape) * share
    return numbers


def family_names(config: ModelSpec) -> Names:
    family = next(f for f in FAMILIES if config.architecture in f.architectures)
    return family.names_of(config)[0]


def kv_bytes(config: ModelSpec, context: float) -> float:
    """Of keys and values that one more token of a sequence reads."""
    return sum(
        2 * layer.attention.kv.numbers * min(context, layer.attention.window or math.inf)
        for layer in config.layers
    )


def decode_bytes(config: ModelSpec, rows: int, context: float) -> float:
    """Bytes that one decode step must read: weights without the embedding, keys and values."""
    weights = 2 * (multiplied(config, max(rows, 1)) + config.vocab_size * config.hidden_size)
    return weights + rows * kv_bytes(config, context)


def attention_operations(layer: LayerSpec, tokens: int) -> float:
    """Of queries with keys and weights with values, causal, within the window."""
    attention = layer.attention
    reach = min(tokens, attention.window or tokens)
    pairs = reach * tokens - reach * reach / 2
    if isinstance(attention, Latent):
        widths = attention.nope_dim + attention.rope_dim + attention.value_dim
    else:
        widths = 2 * attention.head_dim
    return 2 * pairs * attention.heads * widths


def prefill_operations(config: ModelSpec, tokens: int) -> float:
    """Multiplications and additions of a prompt: products, causal attention, no logits."""
    attention = sum(attention_operations(layer, tokens) for layer in config.layers)
    return 2 * multiplied(config, 1) * tokens + attention


def limit_seconds(config: ModelSpec, lengths: Lengths, rows: int) -> float:
    """Prefill at the matrix rate, then decode at the read bandwidth in batches of up to `rows`."""
    prefill = sum(prefill_operations(config, prompt) for prompt, _ in lengths) / MATRIX_RATE
    kv = sum(kv_bytes(config, prompt + output / 2) * output for prompt, output in lengths)
    steps = max(max(output for _, output in lengths), sum(output for _, output in lengths) / rows)
    return prefill + (steps * decode_bytes(config, 0, 0) + kv) / BANDWIDTH


# -- cases -------------------------------------------------------------------------------------


def run_case(bench: Bench, name: str, lengths: Lengths, options: argparse.Namespace) -> None:
    limit = limit_seconds(bench.config, lengths, options.rows)
    output = sum(count for _, count in lengths)
    stats = torch.cuda.memory_stats()
    compiled = len(bench.compilations.names)
    for _ in range(options.rounds):
        profiled = range(options.profile_case, options.profile_case + options.profile)
        seconds = bench.run(lengths, profiled if options.profile_case else range(0))
        if isinstance(bench.loop.executor, StepTimes):
            bench.loop.executor.report()
        arrivals = bench.client.arrivals
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(arrivals)]
        print(
            f"{name:10} {seconds:7.3f} s  {output / seconds:8.0f} tok/s  limit {limit:6.3f} s "
            f"({limit / seconds:4.0%})  median gap {statistics.median(gaps) * 1e3:6.2f} ms "
            f"over {len(arrivals)} steps",
            flush=True,
        )
    after = torch.cuda.memory_stats()
    grown = after["num_device_alloc"] - stats["num_device_alloc"]
    print(
        f"{name:10} while serving: {grown} device allocations, kernels compiled: "
        f"{bench.compilations.names[compiled:]}",
        flush=True,
    )


def run_decode(bench: Bench, rows: int, context: int, options: argparse.Namespace) -> None:
    """Steps in which `rows` rows decode around `context`; the profile says when the GPU waits."""
    # The first rows decode while the last ones' prompts are computed.
    steps = 64 + options.profile
    joining = rows * context // options.prefill
    bench.run([(16, 2)])
    lengths = [(max(context - joining - steps // 2, 16), steps + joining + 8)] * rows
    for prompt, output in lengths:
        _submit(bench, prompt, output)
    bench.client.left = rows
    bench.client.arrivals.clear()
    while len(bench.client.arrivals) < 4 or bench.client.arrivals[-1][1] < rows:
        bench.loop.turn()
    torch.cuda.synchronize()
    busy = None
    if options.profile:
        busy = profile(bench, options.profile)
    seen = len(bench.client.arrivals)
    while bench.client.left:
        bench.loop.turn()
    arrivals = bench.client.arrivals[seen:]
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(arrivals) if b[1] == rows]
    step = statistics.median(gaps)
    limit = decode_bytes(bench.config, rows, context) / BANDWIDTH
    print(
        f"decode {rows:4} x {context:6}: {step * 1e3:6.3f} ms, limit {limit * 1e3:6.3f} "
        f"({limit / step:4.0%})" + (f", GPU idle {1 - busy:5.1%}" if busy is not None else ""),
        flush=True,
    )


def profile(bench: Bench, turns: int) -> float:
    """Share of the time in which some kernel ran."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(turns):
            bench.loop.turn()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    covered, end = 0.0, spans[0][0]
    for first, last in spans:
        covered += max(last - max(first, end), 0)
        end = max(end, last)
    by_name: dict[str, float] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by_name[event.name[:60]] = (
                by_name.get(event.name[:60], 0) + event.time_range.elapsed_us()
            )
    for name, spent in sorted(by_name.items(), key=lambda item: -item[1])[:14]:
        print(f"    {spent / turns:9.1f} us a step  {name}")
    return covered / (end - spans[0][0])


def run_mixed(bench: Bench, rows: int, chunk: int) -> None:
    """Steps of `rows` decoding rows and a prompt of `chunk` tokens: what Python costs them."""
    bench.client.left = rows
    for _ in range(rows):
        _submit(bench, 64, 400)
    bench.client.arrivals.clear()
    while not bench.client.arrivals or bench.client.arrivals[-1][1] < rows - 1:
        bench.loop.turn()
    gaps = []
    profiler = cProfile.Profile()
    for turn in range(24):
        _submit(bench, chunk, 1)
        bench.client.left += 1
        began = time.perf_counter()
        if turn == 12:
            profiler.enable()
        bench.loop.turn()
        gaps.append(time.perf_counter() - began)
    profiler.disable()
    torch.cuda.synchronize()
    print(
        f"mixed {rows} + {chunk}: {statistics.median(gaps[2:12]) * 1e3:6.2f} ms a turn", flush=True
    )
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(28)
    print("\n".join(line[:110] for line in out.getvalue().splitlines() if line.strip()), flush=True)
    while bench.client.left:
        bench.loop.turn()


def _submit(bench: Bench, prompt: int, output: int) -> None:
    known = min(128_000, bench.config.vocab_size)
    tokens = [bench.draw.randrange(10, known) for _ in range(prompt)]
    stopping = StoppingParams(max_new_tokens=output)
    bench.client.requests.append(Request([bench.next_id], tokens, SamplingParams(), stopping))
    bench.next_id += 1


def run_prefill(bench: Bench, tokens: int) -> None:
    times = []
    for _ in range(4):
        bench.run([(tokens, 1)])
        times.append(bench.run([(tokens, 1)]))
    seconds = min(times)
    rate = prefill_operations(bench.config, tokens) / seconds
    print(
        f"prefill {tokens:6}: {seconds * 1e3:8.2f} ms, {rate / 1e12:4.0f} TFLOP/s "
        f"({rate / MATRIX_RATE:4.0%})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workload", default="gpu-workload.json")
    parser.add_argument("--shape", help="of shapes.json, without the workload's cases")
    parser.add_argument("--cases", nargs="*", default=None, help="default: all of the workload")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=512, help="largest batch")
    parser.add_argument("--prefill", type=int, default=4096, help="prompt tokens a step")
    parser.add_argument("--positions", type=int, default=36_864, help="longest sequence")
    parser.add_argument("--kv-cache-dtype", default="auto", help="limits stay those of auto")
    parser.add_argument("--quantize", default="none", help="limits stay those of 16 bits")
    parser.add_argument("--quantize-head", action="store_true", help="and embedding's product")
    parser.add_argument("--decode", nargs="*", default=["1x256", "64x1024", "16x8192", "256x512"])
    parser.add_argument("--mixed", nargs="*", default=["200+128"])
    parser.add_argument("--prompts", nargs="*", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--profile", type=int, default=0, help="turns to profile")
    parser.add_argument("--profile-case", type=int, default=0, help="cases too, from this turn on")
    parser.add_argument("--steps", action="store_true", help="time by kind of step")
    options = parser.parse_args()
    if options.shape:
        shapes = json.loads((Path(__file__).parent / "shapes.json").read_text())
        workload = {"model": shapes[options.shape], "cases": []}
    else:
        workload = json.loads(Path(options.workload).read_text())
    bench = make_bench(workload["model"], options)
    with torch.inference_mode():
        for spec in options.decode:
            rows, context = map(int, spec.split("x"))
            run_decode(bench, rows, context, options)
        for spec in options.mixed:
            rows, chunk = map(int, spec.split("+"))
            run_mixed(bench, rows, chunk)
        for tokens in options.prompts:
            run_prefill(bench, tokens)
        for case in workload["cases"]:
            if options.cases is None or case["name"] in options.cases:
                run_case(bench, case["name"], [tuple(r) for r in case["requests"]], options)


if __name__ == "__main__":
    main()
