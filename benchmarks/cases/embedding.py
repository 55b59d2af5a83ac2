"""Vectors of texts: the engine beside transformers as sentence-transformers drives it, in one run.

Random weights of a published shape. The engine reads texts through its loop, from requests to
vectors on the host. The peer gets the same token ids, sorted by length and padded in batches of 32,
as sentence-transformers' `encode` does. The limit is that of products at the matrix rate: of a GPU
the measured one, of a CPU that of a large product in the same run.

On a machine that does other work, processor seconds of one thread say more than those of a clock.

    embedding --shape minilm bert-base --threads 1
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.support.engine import Bench, Client, Engine
from benchmarks.support.limits import MATRIX_RATE
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE, profiled, synchronise
from tokenpod.core.outputs import StepOutputs
from tokenpod.core.requests import PoolingParams
from tokenpod.models.load import load_model

SMOKE = {
    "cpu": "--shape nano --texts 6 --runs 1",
    "gpu": "--shape minilm --texts 64 --runs 1 --peer-attention sdpa",
}
_BERT = {"model": "BertModel", "max_position_embeddings": 512, "vocab_size": 30_522}
#: transformers' class, and what its config has besides.
SHAPES: dict[str, dict[str, Any]] = {
    "nano": {
        **_BERT,
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 128, "vocab_size": 500},
    },
    "minilm": {
        **_BERT,
        **{"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12},
        "intermediate_size": 1536,
    },
    "bert-base": _BERT,
    "bge-m3": {
        **{"model": "XLMRobertaModel", "vocab_size": 250_002, "hidden_size": 1024},
        **{"num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        **{"max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 1},
    },
    "gte-modernbert": {"model": "ModernBertModel", "vocab_size": 50_368},
    "qwen3-0.6b": {
        **{"model": "Qwen3Model", "vocab_size": 151_669, "hidden_size": 1024},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 32_768},
    },
}
_F4 = torch.float32
#: Tokens of queries, of passages, and of few long ones.
MIXED = ((8, 24, 5), (40, 160, 4), (200, 500, 1))
_BATCH = 32


def options(parser: argparse.ArgumentParser) -> None:
    """Which shape, and what texts."""
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["bert-base"])
    parser.add_argument("--lengths", default="mixed", help="mixed, or tokens of every text")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=8192 if DEVICE.type == "cuda" else 1024)
    parser.add_argument("--dtype", default="bfloat16" if DEVICE.type == "cuda" else "float32")
    parser.add_argument("--peer-attention", default="sdpa", choices=["sdpa", "eager", "none"])
    parser.add_argument("--threads", type=int, help="of a CPU; as many as there are cores")
    parser.add_argument("--kernels", action="store_true", help="on a GPU: what takes the time")


def run(asked: argparse.Namespace, report: Report) -> None:
    """Each shape: the engine, the peer, by turns."""
    dtype = getattr(torch, asked.dtype)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    for name in asked.shape:
        with tempfile.TemporaryDirectory() as scratch:
            _shape(name, Path(scratch), dtype, asked, report)


def _shape(
    name: str, folder: Path, dtype: torch.dtype, asked: argparse.Namespace, report: Report
) -> None:
    settings = dict(SHAPES[name])
    model_class = getattr(transformers, settings.pop("model"))
    kind = {} if asked.peer_attention == "none" else {"attn_implementation": asked.peer_attention}
    with DEVICE:
        peer = model_class._from_config(model_class.config_class(**settings), dtype=dtype, **kind)
    peer = peer.eval()
    peer.save_pretrained(folder)
    _say(f"{name}: random weights are made")
    if model_class is transformers.Qwen3Model:
        # What makes a decoder one of texts' vectors.
        _last_token(folder)
    model: Any = load_model(
        folder, dtype=dtype, device=DEVICE, progress=lambda done, total: None, task="embed"
    )
    rows = 256 if DEVICE.type == "cuda" else 64
    engine = Engine(model, DEVICE, rows=rows, positions=512, prefill=asked.prefill)
    _say(f"{name}: the engine is warm after {engine.warm_s:.1f} s")
    draw = random.Random(5)
    vocabulary = settings["vocab_size"]
    texts = [
        [draw.randrange(10, vocabulary) for _ in range(n)]
        for n in lengths(asked.lengths, asked.texts, draw)
    ]
    tokens = sum(map(len, texts))
    _read(engine, model, texts)
    _say(f"{name}: texts have been read once")
    if asked.peer_attention != "none":
        _padded(peer, texts)
    if asked.kernels:
        share, kernels = profiled(lambda: _read(engine, model, texts))
        report.row("busy", shape=name, busy_share=share)
        for kernel, microseconds in kernels[:12]:
            report.row("kernels", kernel=kernel[:60], ms=microseconds / 1e3)
    ours, theirs = [], []
    for _ in range(asked.runs):
        ours.append(_read(engine, model, texts))
        if asked.peer_attention != "none":
            theirs.append(_padded(peer, texts))
    numbers = sum(
        each.numel()
        for label, each in peer.named_parameters()
        if each.dim() == 2 and "embed" not in label
    )
    rate = MATRIX_RATE if DEVICE.type == "cuda" else _matrix_rate(dtype)
    best = tokens / min(spent.seconds for spent in ours)
    cells: dict[str, Any] = {
        "shape": name,
        "lengths": asked.lengths,
        "texts_per_s": [len(texts) / spent.seconds for spent in ours],
        "tokens_per_s": [tokens / spent.seconds for spent in ours],
        "matrix_rate_share": 2 * numbers * best / rate,
        "start_s": engine.warm_s,
        "least_cosine": _least_cosine(engine, model, peer, texts[:8]),
    }
    if theirs:
        pairs = list(zip(theirs, ours, strict=True))
        cells |= {
            "peer_tokens_per_s": [tokens / spent.seconds for spent in theirs],
            "times_peer": [a.seconds / b.seconds for a, b in pairs],
        }
        if DEVICE.type == "cpu":
            cells["times_peer_by_processor"] = [a.processor / b.processor for a, b in pairs]
    report.row("embedding", **cells)


def lengths(kind: str, count: int, draw: random.Random) -> list[int]:
    """Tokens of texts."""
    if kind != "mixed":
        return [int(kind)] * count
    spans = draw.choices(MIXED, weights=[weight for *_, weight in MIXED], k=count)
    return [draw.randint(low, high) for low, high, _ in spans]


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock, and of processors of this process, since it began."""

    seconds: float
    processor: float

    @classmethod
    def now(cls) -> Spent:
        """Since the machine began, and the process."""
        return cls(time.perf_counter(), time.process_time())

    def ago(self) -> Spent:
        """How long ago that was."""
        now = Spent.now()
        return Spent(now.seconds - self.seconds, now.processor - self.processor)


class Reader(Client):
    """Keeps vectors, too."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[int, torch.Tensor] = {}

    def send(self, message: object) -> None:
        """Take a message of the engine."""
        super().send(message)
        for each in message.vectors if isinstance(message, StepOutputs) else ():
            self.vectors[each.sequence_id] = torch.frombuffer(bytearray(each.numbers), dtype=_F4)


def _least_cosine(engine: Engine, model: Any, peer: Any, texts: list[list[int]]) -> float:
    """Between our vectors and the peer's of the same texts, each by itself: the least."""
    client = Reader()
    _read(engine, model, texts, client)
    found = []
    for at, text in enumerate(texts):
        with torch.inference_mode():
            states = peer(input_ids=torch.tensor([text], device=DEVICE)).last_hidden_state[0]
        last = model.pooling.spec.mode == "last_token"
        expected = states[-1].float() if last else states.float().mean(0)
        found.append(torch.cosine_similarity(client.vectors[at], expected.cpu(), dim=0).item())
    return min(found)


def _read(
    engine: Engine, model: Any, texts: list[list[int]], client: Client | None = None
) -> Spent:
    """What it takes until all vectors are there."""
    client = client or Client()
    pools = {"pools": True, "whole_prompts": model.config.encodes}
    loop = engine.loop(client, limits=pools, full=False)
    bench = Bench(loop, client, engine.vocabulary)
    began = Spent.now()
    for text in texts:
        bench.ask(text, 1, pooling=PoolingParams())
    while client.left:
        loop.turn()
    loop.turn()
    assert not client.refused, client.refused[0]
    return began.ago()


@torch.inference_mode()
def _padded(peer: Any, texts: list[list[int]]) -> Spent:
    """What batches of texts of like length take, to their means on the host."""
    began = Spent.now()
    order = sorted(texts, key=len, reverse=True)
    for at in range(0, len(order), _BATCH):
        batch = order[at : at + _BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in batch])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in batch])
        ids, mask = ids.to(DEVICE), mask.to(DEVICE)
        states = peer(input_ids=ids, attention_mask=mask).last_hidden_state
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        torch.nn.functional.normalize(means.float()).cpu()
    synchronise()
    return began.ago()


def _say(what: str) -> None:
    """Progress: on a GPU whose kernels are not compiled yet, a shape takes a minute."""
    print(what, file=sys.stderr, flush=True)


def _last_token(folder: Path) -> None:
    """Files of sentence-transformers."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [{"path": path, "type": f"models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))


def _matrix_rate(dtype: torch.dtype) -> float:
    """Operations per second of a large product."""
    x = torch.randn(1024, 2048).to(dtype)
    weight = torch.randn(2048, 2048).to(dtype)
    best = 0.0
    for _ in range(4):
        began = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best = max(best, 2 * 1024 * 2048 * 2048 / (time.perf_counter() - began))
    return best
