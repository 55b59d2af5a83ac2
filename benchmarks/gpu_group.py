"""A group of ranks on several GPUs: the same tokens as one rank's, and what lost ranks cost.

    python -P benchmarks/gpu_group.py --ranks 2 [--model /tmp/checkpoint]

Starts `tokenpod serve` with one rank and with several, compares greedy tokens, then kills and stops
ranks while a stream runs. For each fault it prints seconds until NOT_SERVING, until the stream
ended with UNAVAILABLE, and until the group generates again. Without a model it makes a small one of
Llama's shape with random weights. One case that fails prints its error, and the rest go on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
sys.path.insert(0, str(Path(__file__).parent))

from faults import Seen, engines, kill, stop, table, try_fault
from gpu_serve import make_checkpoint
from harness import ServerProcess, generate, serve, text_request

PROMPT = "import os and then the whole rest of a program that reads files " * 4
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "model_type": "llama",
}
#: Strike, rank, phase. A rank of -1 is the last one.
FAULTS: list[tuple[Callable[[int], None], int, str]] = [
    (kill, -1, "decode"),
    (stop, -1, "decode"),
    (kill, 0, "decode"),
    (stop, 0, "idle"),
    (kill, -1, "idle"),
]


def tokens(server: ServerProcess, count: int) -> tuple[list[int], float]:
    """Greedy tokens, and milliseconds a token."""
    request = text_request(PROMPT, stopping={"max_new_tokens": count, "ignore_eos": True})
    generate(server.stub(), request)
    began = time.perf_counter()
    got = list(generate(server.stub(), request).samples[0].token_ids)
    return got, (time.perf_counter() - began) * 1000 / count


@contextlib.contextmanager
def told_if_it_fails(server: ServerProcess) -> Iterator[None]:
    try:
        yield
    except Exception:
        print(f"the server's log:\n{server.log.read_text()[-4000:]}", flush=True)
        raise


def run(title: str, case: Callable[[], str]) -> None:
    try:
        print(f"{title}: {case()}", flush=True)
    except Exception:
        print(f"{title}: FAILED\n{traceback.format_exc(limit=3)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", type=Path, default=Path("/tmp/gpu-group-model"))
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        make_checkpoint(options.model, SMALL)
    flags = ["--model-id", str(options.model), "--device", options.device, "--max-batch-size", "64"]
    flags += ["--memory-fraction", "0.5"]
    alone: list[int] = []
    seen: dict[str, list[Seen]] = {}

    def one_rank() -> str:
        began = time.perf_counter()
        with serve(*flags) as server:
            started = time.perf_counter() - began
            alone[:], ms = tokens(server, options.tokens)
            server.stop()
        return f"SERVING after {started:.1f} s, {ms:.2f} ms a token"

    def group() -> str:
        began = time.perf_counter()
        with serve(*flags, "--num-shard", str(options.ranks)) as server, told_if_it_fails(server):
            started = time.perf_counter() - began
            got, ms = tokens(server, options.tokens)
            pairs = zip(got, alone, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(got))
            print(
                f"{options.ranks} ranks: SERVING after {started:.1f} s, {ms:.2f} ms a token,"
                f" the first {same} of {len(got)} tokens as one rank's",
                flush=True,
            )
            for strike, rank, phase in FAULTS:
                name = f"{strike.__name__} rank {rank % options.ranks}, {phase}"
                run(name, lambda s=strike, r=rank, p=phase, n=name: fault(server, s, r, p, n))
            return f"exit status {server.stop()}"

    def fault(
        server: ServerProcess, strike: Callable[[int], None], rank: int, phase: str, name: str
    ) -> str:
        # The first children are front ends or ranks: ranks run the engine.
        ranks = [pid for pid in engines(server) if b"engine" in _command(pid)]
        told = try_fault(server, lambda: strike(ranks[rank]), phase)
        seen.setdefault(name, []).append(told)
        again = tokens(server, 16)[0]
        return f"{told}, tokens {'as before' if again == alone[:16] else 'differ'}"

    run("1 rank", one_rank)
    run("group", group)
    print(table(seen))


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


if __name__ == "__main__":
    main()
