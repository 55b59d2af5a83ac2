"""A pod through gRPC: a workload's cases, open loops and bursts, beside other versions or servers.

On a GPU the shape of an 8B Llama in bf16, on a CPU 15 million parameters in float32, with random
weights. With `--weights bfloat16` the latter are stored so; all compute in float32 there. The
client is `tokenpod bench`. Flags of `tokenpod serve` come after `--`.

    serve --workload gpu-workload.json --cases sharegpt uneven
    serve --rates 36 51 --requests 1000                 Poisson arrivals, chat-like lengths
    serve --rates inf --requests 1000                   a burst: first token p50 and p99
    serve --workload w.json --against ../before --rounds 3      by turns with another checkout's pod
    serve --workload w.json --peer 127.0.0.1:9000     by turns with vLLM's gRPC server, which runs
    serve --workload cpu-workload.json --cases a b c --transformers -- --threads 1
    serve --ranks 2 ...                                 two GPUs
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import loads, transformers_peer, vllm_calls
from benchmarks.support.models import make_checkpoint, shape_names, shape_of
from benchmarks.support.pod import Pod, bench
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE, pair_ratios

GPU = DEVICE.type == "cuda"
#: Of a case, at most: each has a seed of its own.
_ROUNDS = 1000
SMOKE = {
    "cpu": "--shape tiny --requests 8 --longest 64 --processes 1 --rates inf 20 --transformers",
    "gpu": "--shape tiny --requests 8 --longest 64 --processes 1 --rates inf -- --max-batch-size 8",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=shape_names(), default="llama-3.1-8b" if GPU else "15m")
    parser.add_argument("--weights", choices=("float32", "bfloat16", "float16"), help="of it")
    parser.add_argument("--folder", type=Path, help="of the checkpoint, made if it is not there")
    parser.add_argument("--model", help="instead: what --model-id says, such as demo")
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--cases", nargs="*", help="of the workload; default: all")
    parser.add_argument("--rates", nargs="*", default=[], help="requests per second; inf: at once")
    parser.add_argument("--requests", type=int, default=1000, help="of each rate")
    parser.add_argument("--longest", type=int, default=1024, help="prompt and output of those")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=4 if GPU else 1, help="of the client")
    parser.add_argument("--connections", type=int, default=4, help="of each client process")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout's pod")
    parser.add_argument("--peer", metavar="ADDRESS", help="a server that speaks vLLM's protocol")
    parser.add_argument("--transformers", action="store_true", help="its generate, on a CPU")
    parser.add_argument("--threads", type=int, default=2, help="of transformers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bench", nargs="*", default=[], help="more options of tokenpod bench")
    parser.add_argument("flags", nargs="*", help="of tokenpod serve, after --")


def run(asked: argparse.Namespace, report: Report | None) -> None:
    """Every case by turns with every server."""
    if asked.child:
        transformers_peer.work(asked.folder, asked.threads)
        return
    assert report is not None
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = asked.folder or scratch / "model"
        shape, model = {**shape_of(asked.shape), "eos_token_id": 1}, asked.model
        if asked.workload:
            shape = loads.workload_cases(asked.workload)[1] or shape
        if model is None:
            weights = asked.weights or ("bfloat16" if GPU else "float32")
            model = str(make_checkpoint(folder, shape, getattr(torch, weights)))
        flags = ["--model-id", model, *asked.flags]
        flags += ["--max-concurrent-requests", "4096", "--max-queue-tokens", "4000000"]
        flags += ["--num-shard", str(asked.ranks)] if asked.ranks > 1 else []
        # Multicast stays off: a fault there can take all of a host's GPUs out of service.
        os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
        servers: dict[str, str] = {}
        pods: dict[str, Pod] = {}
        trees = {
            "now": {},
            **({"before": {"tree": asked.against.resolve()}} if asked.against else {}),
        }
        for name, tree in trees.items():
            pods[name] = stack.enter_context(Pod(flags, **tree))
            servers[name] = pods[name].address
            report.row("start", server=name, seconds_to_SERVING=pods[name].started_s)
        if asked.peer:
            servers["peer"] = asked.peer
        peers: dict[str, transformers_peer.Peer] = {}
        if asked.transformers:
            peer = transformers_peer.Peer(Path(model), asked.threads)
            peers["transformers"] = stack.enter_context(peer)
        servers |= dict.fromkeys(peers, "")
        loads_of = cases(asked, 1000 if asked.model else shape["vocab_size"])
        for number, (name, load) in enumerate(loads_of.items()):
            for peer in peers.values():  # warm
                peer.level([([11] * 16, 2)])
            first_seed = asked.seed + _ROUNDS * number
            measure(name, load, servers, pods, peers, scratch, asked, first_seed, report)


@dataclass(frozen=True)
class Case:
    """A load: as options of `tokenpod bench`, and as lengths and a rate for a peer."""

    options: list[str]
    lengths: list[tuple[int, int]]
    rate: float
    vocabulary: int


def cases(asked: argparse.Namespace, vocabulary: int) -> dict[str, Case]:
    """Of the workload, then of --rates."""
    found, known = {}, min(vocabulary, 128_000)
    if asked.workload:
        by_name, _ = loads.workload_cases(asked.workload)
        for name in asked.cases or by_name:
            several = len(by_name[name]) > 1
            own = ["--workload", str(asked.workload), "--case", name]
            own += ["--warmup", "4" if several else "1"]
            own += ["--request-rate", "inf"] if several else []
            found[name] = Case(own, by_name[name], float("inf"), known)
    median, longest = asked.longest // 6, asked.longest
    for rate in asked.rates:
        own = ["--request-rate", rate, "--requests", str(asked.requests)]
        own += ["--input-tokens", f"lognormal:{median}:1.0:{longest}"]
        own += ["--output-tokens", f"lognormal:{longest // 5}:0.9:{longest}"]
        own += ["--token-range", f"10:{known}"]
        drawn = [(prompt, new) for prompt, new, _ in loads.chat(asked.requests, longest)]
        found[f"{asked.requests} at {rate}/s"] = Case(own, drawn, float(rate), known)
    return found


def measure(
    name: str,
    load: Case,
    servers: dict[str, str],
    pods: dict[str, Pod],
    peers: dict[str, transformers_peer.Peer],
    scratch: Path,
    asked: argparse.Namespace,
    first_seed: int,
    report: Report,
) -> None:
    """A row per server; with several, the ratios of pairs too."""
    found: dict[str, list[dict[str, Any]]] = {server: [] for server in servers}
    busy: dict[str, list[dict[str, float]]] = {server: [] for server in servers}
    processes = asked.processes if len(load.lengths) > 1 else 1
    for turn in range(asked.rounds):
        # Fresh prompts each round and case: nothing of one is in a prefix cache in the next.
        seed = first_seed + turn
        for server in list(servers)[:: 1 if turn % 2 == 0 else -1]:
            before = pods[server].processor() if server in pods else {}
            if server in peers:
                level = peers[server].level(
                    loads.random_prompts(load.lengths, load.vocabulary, seed)
                )
            elif asked.peer:
                level = vllm_calls.level(
                    servers[server],
                    load.lengths,
                    load.vocabulary,
                    rate=load.rate,
                    seed=seed,
                    processes=processes,
                )
            else:
                own = ["--processes", str(processes), "--connections", str(asked.connections)]
                own += ["--seed", str(seed), *asked.bench]
                file = scratch / "bench.json"
                level = bench(servers[server], *load.options, *own, json_file=file)["levels"][0]
            after = pods[server].processor() if server in pods else {}
            found[server].append(level)
            busy[server].append({part: after[part] - before[part] for part in after})
    for server, levels in found.items():
        ms: dict[str, list[float]] = {}
        for which in ("ttft", "itl"):
            for share in ("p50", "p99"):
                of = [level["latency_s"].get(which) or {} for level in levels]
                ms[f"{which}_{share}_ms"] = [1e3 * (each.get(share) or 0.0) for each in of]
        tokens = [level["tokens"]["output"] for level in levels]
        front = [each.get("front", 0.0) for each in busy[server]]
        report.row(
            "through gRPC",
            case=name,
            server=server,
            seconds=[level["duration_s"] for level in levels],
            **{
                "output_tokens/s": [
                    n / each["duration_s"] for n, each in zip(tokens, levels, strict=True)
                ]
            },
            **ms,
            front_us_a_token=[
                1e6 * used / max(n, 1) for used, n in zip(front, tokens, strict=True)
            ],
            engine_processor_s=[each.get("rest", 0.0) for each in busy[server]],
        )
    ours = [level["duration_s"] for level in found["now"]]
    for server in servers:
        if server != "now":
            other = [level["duration_s"] for level in found[server]]
            ratios = pair_ratios(other, ours)
            report.row("pairs", case=name, other=server, other_seconds_over_ours=ratios)
            print(f"{name}: {statistics.median(ratios):.3f} times as fast as {server}")
