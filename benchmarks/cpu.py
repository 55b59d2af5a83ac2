"""Tokenpod over gRPC against transformers on one CPU, interleaved, as ratios.

    python benchmarks/cpu.py --workload FILE [--models 15m 160m] [--rounds 3] [--json OUT]

Llama shapes with random weights, greedy, end of sequence ignored. `generate` is transformers'
`generate` in static batches of 16 (left padded, each batch runs to its longest output);
`continuous` is transformers' continuous batching. They get all threads; Tokenpod's engine one less,
since its front end runs beside it. All peers stay loaded for the whole run and take
turns, case by case, so that a slow moment of the machine hits all of them. An output token counts
only if its request asked for it. The workload file holds, per case, [prompt tokens, output tokens]
as `{"requests": [{"prompt": n, "output": m}, ...]}`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "15m": {
        "hidden_size": 288,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "intermediate_size": 768,
        "vocab_size": 8192,
    },
    "160m": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32000,
    },
}
CASES = {"15m": ("a", "b", "c"), "160m": ("a", "s")}
BATCH = 16
Requests = list[tuple[list[int], int]]


def main() -> None:
    arguments = parse()
    if arguments.worker:
        worker(arguments.worker, arguments.folder, arguments.threads)
        return
    cases = json.loads(Path(arguments.workload).read_text())
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for shape in arguments.models:
            folder = make_model(Path(scratch) / shape, SHAPES[shape])
            with contextlib.ExitStack() as stack:
                peers: dict[str, Any] = {}
                if "tokenpod" in arguments.peers:
                    peers["tokenpod"] = stack.enter_context(
                        Tokenpod(folder, max(arguments.threads - 1, 1))
                    )
                for name in ("generate", "continuous"):
                    if name in arguments.peers:
                        peers[name] = stack.enter_context(Worker(name, folder, arguments.threads))
                for case in arguments.cases or CASES[shape]:
                    # Fresh prompts each round: nothing of one is in a prefix cache in the next.
                    rounds = [
                        prompts(cases[case], SHAPES[shape]["vocab_size"], seed)
                        for seed in range(arguments.rounds + 1)
                    ]
                    key = f"{shape} {case}"
                    results[key] = interleave(peers, rounds, key)
    report(results)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workload", default="cpu-workload.json")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=None)
    parser.add_argument("--peers", nargs="+", default=["tokenpod", "generate", "continuous"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(folder: Path, shape: dict[str, int]) -> Path:
    """A checkpoint with random weights, and a tokenizer with a vocabulary of its size."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=1
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"tok{i}" for i in range(shape["vocab_size"] - len(alphabet))]
    vocabulary = {word: at for at, word in enumerate(alphabet + words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def prompts(case: dict[str, Any], vocab_size: int, seed: int) -> Requests:
    """Random prompts of the case's lengths."""
    draw = random.Random(seed)
    return [
        ([draw.randrange(10, vocab_size) for _ in range(request["prompt"])], request["output"])
        for request in case["requests"]
    ]


def interleave(peers: dict[str, Any], rounds: list[Requests], key: str) -> dict[str, list[float]]:
    """Output tokens a second, per peer and round; one short warm-up each, with the first round."""
    wanted = sum(output for _, output in rounds[0])
    rates: dict[str, list[float]] = {name: [] for name in peers}
    for peer in peers.values():
        peer.run([(prompt, min(output, 8)) for prompt, output in rounds[0][:BATCH]])
    for requests in rounds[1:]:
        for name, peer in peers.items():
            seconds = peer.run(requests)
            rates[name].append(wanted / seconds)
        row = "  ".join(f"{name} {rate[-1]:8.1f}" for name, rate in rates.items())
        print(f"{key}: {row} tokens/s", flush=True)
    return rates


def report(results: dict[str, dict[str, list[float]]]) -> None:
    print(
        "\n| case | peer | tokens/s: median (min to max) | ratio to generate: median (min to max) |"
    )
    print("|---|---|---|---|")
    for key, rates in results.items():
        base = rates.get("generate")
        for name, rate in rates.items():
            spread = f"{statistics.median(rate):.1f} ({min(rate):.1f} to {max(rate):.1f})"
            ratio = ""
            if base:
                pairs = [mine / theirs for mine, theirs in zip(rate, base, strict=True)]
                ratio = f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
            print(f"| {key} | {name} | {spread} | {ratio} |")


# -- Tokenpod ----------------------------------------------------------------------------------


class Tokenpod:
    """A server process; token ids in, one streaming call a request, all at once."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._threads = threads

    def __enter__(self) -> Tokenpod:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        port, health = free_port(), free_port()
        flags = {
            "--model-id": str(self._folder),
            "--hostname": "127.0.0.1",
            "--port": str(port),
            "--health-port": str(health),
            "--threads": str(self._threads),
            "--max-total-tokens": "1024",
            "--lame-duck-seconds": "0",
            "--log-level": "warning",
        }
        command = [sys.executable, "-P", "-m", "tokenpod", "serve"]
        self._process = subprocess.Popen(
            command + [part for pair in flags.items() for part in pair]
        )
        self._address = f"127.0.0.1:{port}"
        with grpc.insecure_channel(f"127.0.0.1:{health}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            check = health_pb2.HealthCheckRequest(service="readiness")
            while stub.Check(check, wait_for_ready=True, timeout=60).status != 1:
                time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)

    def run(self, requests: Requests) -> float:
        return asyncio.run(self._run(requests))

    async def _run(self, requests: Requests) -> float:
        import grpc

        from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
        from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = rpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]

            async def one(prompt: list[int], output: int) -> None:
                request = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=prompt),
                    stopping=pb.StoppingOptions(max_new_tokens=output, ignore_eos=True),
                )
                generated = 0
                async for event in stub.Generate(request):
                    generated += len(event.tokens.token_ids)
                assert generated == output, (generated, output)

            began = time.perf_counter()
            await asyncio.gather(*(one(*request) for request in requests))
            return time.perf_counter() - began


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- transformers ------------------------------------------------------------------------------


class Worker:
    """A peer in a process of its own, spoken to in JSON lines."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self._command = [sys.executable, "-P", __file__, "--worker", name, "--folder", str(folder)]
        self._command += ["--threads", str(threads)]

    def __enter__(self) -> Worker:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, requests: Requests) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"the peer ended: {self._command}")


def worker(name: str, folder: str, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with {"generate": static_batches, "continuous": continuous_batching}[name](model) as run:
        for line in sys.stdin:
            requests = json.loads(line)
            began = time.perf_counter()
            with torch.inference_mode():
                run(requests)
            print(f"seconds {time.perf_counter() - began}", flush=True)


@contextlib.contextmanager
def static_batches(model: Any) -> Iterator[Any]:
    import torch

    def run(requests: Requests) -> None:
        for at in range(0, len(requests), BATCH):
            batch = requests[at : at + BATCH]
            width = max(len(prompt) for prompt, _ in batch)
            ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
            new = max(output for _, output in batch)
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )

    yield run


@contextlib.contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
    # One manager for the whole run: its start is not what is measured.
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    made = 0

    def run(requests: Requests) -> None:
        nonlocal made
        for prompt, output in requests:
            made += 1
            manager.add_request(prompt, request_id=f"r{made}", max_new_tokens=output)
        done = 0
        while done < len(requests):
            result = manager.get_result(timeout=1)
            done += result is not None and result.is_finished()

    yield run
    manager.stop(block=True)


if __name__ == "__main__":
    main()
