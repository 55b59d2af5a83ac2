"""A whole server on a GPU: a checkpoint on disk, `tokenpod serve`, `tokenpod bench` as its client.

    python -P benchmarks/gpu_serve.py --workload gpu-workload.json --cases sharegpt uneven

Makes a checkpoint of the workload's shape with random bf16 weights once, then measures the time
from the command to SERVING (twice: the second start finds the kernels compiled) and each case.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENPOD = [sys.executable, "-P", "-m", "tokenpod"]


def make_checkpoint(folder: Path, model: dict[str, Any]) -> None:
    """Random weights under the names of the format, a file for every four layers."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, inner, vocabulary = (
        model[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head_dim = model["head_dim"]
    query, key = (model[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02).cpu()

    parts: list[dict[str, torch.Tensor]] = [
        {
            "model.embed_tokens.weight": draw(vocabulary, hidden),
            "lm_head.weight": draw(vocabulary, hidden),
            "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
    ]
    for layer in range(model["num_hidden_layers"]):
        if layer % 4 == 0:
            parts.append({})
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            parts[-1][f"{prefix}{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            parts[-1][f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    index = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(model))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"tok{i}" for i in range(vocabulary - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(alphabet + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


class Server:
    """`tokenpod serve` in a process of its own."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.port, self.health = _free_port(), _free_port()
        command = [*TOKENPOD, "serve", "--model-id", str(folder), "--port", str(self.port)]
        command += ["--hostname", "127.0.0.1", "--health-port", str(self.health)]
        command += ["--max-concurrent-requests", "4096", "--max-queue-tokens", "4000000"]
        command += ["--lame-duck-seconds", "0", "--log-level", "warning"]
        self.began = time.perf_counter()
        self.process = subprocess.Popen([*command, *options])

    def wait(self) -> float:
        """Seconds from the command to SERVING."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(f"127.0.0.1:{self.health}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            check = health_pb2.HealthCheckRequest(service="readiness")
            while self.process.poll() is None:
                try:
                    if stub.Check(check, timeout=5).status == 1:
                        return time.perf_counter() - self.began
                except grpc.RpcError:
                    pass
                time.sleep(0.05)
        raise SystemExit(f"the server ended with status {self.process.returncode}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def run_case(
    server: Server, workload: str, case: dict[str, Any], options: argparse.Namespace
) -> None:
    target = Path(options.out) / f"{case['name']}.json"
    several = len(case["requests"]) > 1
    command = [*TOKENPOD, "bench", "--address", f"127.0.0.1:{server.port}"]
    command += ["--workload", workload, "--case", case["name"], "--json", str(target)]
    command += ["--warmup", "4" if several else "1"]
    command += ["--processes", str(options.processes if several else 1)]
    if several:
        command += ["--request-rate", "inf"]
    subprocess.run(command, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workload", default="gpu-workload.json")
    parser.add_argument("--cases", nargs="*", default=None)
    parser.add_argument("--folder", default="/tmp/checkpoint")
    parser.add_argument("--out", default=".", help="folder for the JSON reports")
    parser.add_argument("--processes", type=int, default=4, help="of the client")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("serve", nargs="*", help="after --: more options of tokenpod serve")
    options = parser.parse_args()
    workload = json.loads(Path(options.workload).read_text())
    folder = Path(options.folder)
    if not (folder / "config.json").exists():
        began = time.perf_counter()
        make_checkpoint(folder, workload["model"])
        print(f"checkpoint made in {time.perf_counter() - began:.0f} s", flush=True)
    for start in range(options.starts):
        server = Server(folder, options.serve)
        print(f"start {start + 1}: SERVING after {server.wait():.1f} s", flush=True)
        if start + 1 < options.starts:
            server.stop()
    for case in workload["cases"]:
        if options.cases is None or case["name"] in options.cases:
            run_case(server, options.workload, case, options)
    server.stop()


if __name__ == "__main__":
    main()
