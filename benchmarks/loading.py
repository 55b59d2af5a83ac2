"""How fast weights are read from a disk, beside `readinto` of the same files.

    python benchmarks/loading.py [--folder DIR] [--rounds 5] [--layers 8] [--device cuda]

Writes a checkpoint of random bf16 weights of a Llama shape in two files (1.0 GB with 8 layers), or
takes the one that lies in --folder. Then reads it in turns, each in a process of its own: by
one thread's `readinto` in pieces of 16 MiB into one buffer, and by what a server does, which leaves
every weight in memory of its own. Before a cold round the files' pages are dropped from the cache
(posix_fadvise). Prints the medians, their ratio, and the anonymous memory that loading took at most
beyond the weights that stay. What follows in a server, packing weights for its products, is no part
of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

PIECE = 16 * 2**20
MIB = 2**20


def main() -> None:
    arguments = parse()
    if arguments.read:
        print(json.dumps(READERS[arguments.read](arguments.folder, arguments.device)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder and arguments.folder.parent) as scratch:
        folder = arguments.folder or written(Path(scratch) / "model", arguments.layers)
        report = compared(folder, arguments.rounds, arguments.device)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; {report['bytes'] / 1e9:.2f} GB")
    for state in ("cold", "cached"):
        plain, ours = report[state]["readinto"], report[state]["weights"]
        print(
            f"{state:7} readinto {plain['rate']:5.2f} GB/s, {plain['cpu']:4.2f} s of CPU   "
            f"weights {ours['rate']:5.2f} GB/s, {ours['cpu']:4.2f} s of CPU   "
            f"ratio {ours['rate'] / plain['rate']:4.2f}"
        )
    print(f"staging at most {report['staging'] / MIB:.0f} MiB of anonymous memory")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="a model's folder; unset: one is made")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8, help="of the model that is made")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--device", default="cpu", help="where weights go")
    parser.add_argument("--read", choices=list(READERS), help=argparse.SUPPRESS)
    return parser.parse_args()


def compared(folder: Path, rounds: int, device: str) -> dict:
    """GB/s of both readers, medians of interleaved rounds, and the most staging."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    report: dict = {"bytes": size, "rounds": rounds, "staging": 0}
    for state in ("cold", "cached"):
        results: dict[str, list[dict]] = {name: [] for name in READERS}
        read("readinto", folder, device)
        for _ in range(rounds):
            for name in READERS:
                if state == "cold":
                    drop(files)
                result = read(name, folder, device)
                results[name].append(result)
                report["staging"] = max(report["staging"], result.get("staging", 0))
        report[state] = {
            name: {
                "rate": size / 1e9 / statistics.median(x["seconds"] for x in runs),
                "cpu": statistics.median(x["cpu"] for x in runs),
            }
            for name, runs in results.items()
        }
    return report


def read(name: str, folder: Path, device: str) -> dict:
    """What one reader says, in a process of its own."""
    command = [sys.executable, "-P", __file__, "--read", name, "--folder", str(folder)]
    command += ["--device", device]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def drop(files: list[Path]) -> None:
    """Let the kernel forget the files' pages."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_readinto(folder: Path, device: str) -> dict:
    del device
    buffer = memoryview(bytearray(PIECE))
    began, used = time.perf_counter(), time.process_time()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used}


def by_reading(folder: Path, device: str) -> dict:
    """As a server does, after imports: header and config, checks, weights."""
    from tokenpod.models.checkpoint import Checkpoint
    from tokenpod.models.folder import read_layout
    from tokenpod.models.reading import read_weights

    torch.set_num_threads(1)
    read: dict = {
        "dtype": torch.bfloat16,
        "device": torch.device(device),
        "progress": lambda *_: None,
    }
    torch.zeros(1, device=device)
    with AnonymousMemory() as memory:
        began, used = time.perf_counter(), time.process_time()
        with Checkpoint(folder) as checkpoint:
            weights = read_weights(checkpoint, read_layout(folder, checkpoint).weights, **read)
        if device != "cpu":
            torch.cuda.synchronize()
        spent = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used}
    stays = sum(weight.nbytes for weight in weights.values() if weight.device.type == "cpu")
    return {**spent, "staging": memory.most - stays}


READERS = {"readinto": by_readinto, "weights": by_reading}


class AnonymousMemory:
    """How much a process takes at most beyond what it had, looked at every millisecond."""

    def __enter__(self) -> AnonymousMemory:
        self.most = 0
        self._first = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, anonymous_bytes() - self._first)


def anonymous_bytes() -> int:
    """Of this process, in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def written(folder: Path, layers: int) -> Path:
    """A Llama of 2048 features and 32,000 tokens with random weights, in two files."""
    folder.mkdir()
    hidden, inner, kv = 2048, 5632, 512
    shapes = {"model.embed_tokens": (32_000, hidden), "lm_head": (32_000, hidden)}
    shapes["model.norm"] = (hidden,)
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{x}_proj": (hidden, hidden) for x in "qo"}
        shapes |= {f"{layer}.self_attn.{x}_proj": (kv, hidden) for x in "kv"}
        shapes |= {f"{layer}.mlp.{x}_proj": (inner, hidden) for x in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{layer}.{x}": (hidden,) for x in norms}
    names = list(shapes)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    index = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number}-of-2.safetensors"
        save_file(
            {f"{name}.weight": torch.randn(shapes[name], dtype=torch.bfloat16) for name in half},
            folder / file,
        )
        index |= {f"{name}.weight": file for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main()
