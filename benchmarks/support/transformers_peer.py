"""transformers' `generate` as a peer of a pod on a CPU: in static batches of 16, left padded, each
run to its longest output; a process of its own, spoken to in JSON lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 16
Requests = list[tuple[list[int], int]]


class Peer:
    """A checkpoint, loaded until the context is left."""

    def __init__(self, folder: Path, threads: int) -> None:
        program = str(Path(__file__).resolve().parents[1] / "run.py")
        self._command = [sys.executable, "-P", program, "serve", "--child"]
        self._command += ["--folder", str(folder), "--threads", str(threads)]

    def __enter__(self) -> Peer:
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

    def level(self, requests: Requests) -> dict[str, Any]:
        """What `tokenpod bench` reports of a load, as far as this peer knows it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                tokens = {"output": sum(output for _, output in requests)}
                return {"duration_s": float(line.split()[1]), "tokens": tokens, "latency_s": {}}
        raise RuntimeError(f"the peer ended: {self._command}")


def work(folder: str, threads: int) -> None:
    """Answer lists of requests from stdin, a line each."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        requests, began = json.loads(line), time.perf_counter()
        with torch.inference_mode():
            for at in range(0, len(requests), BATCH):
                generate(model, requests[at : at + BATCH])
        print(f"seconds {time.perf_counter() - began}", flush=True)


def generate(model: Any, batch: Requests) -> None:
    """A static batch."""
    import torch

    width = max(len(prompt) for prompt, _ in batch)
    new = max(output for _, output in batch)
    pads = [width - len(prompt) for prompt, _ in batch]
    model.generate(
        torch.tensor([[0] * pad + p for pad, (p, _) in zip(pads, batch, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )
