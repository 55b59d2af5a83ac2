"""Constrained rows in the engine's loop: what masks cost a batch, and what schemas cost streams.

    python -P benchmarks/gpu_constraints.py                    an 8B shape of random weights, H200
    python -P benchmarks/gpu_constraints.py --cpu              the embedded model

Cases, each after the other over one engine:

    plain     64 rows (--rows) of sampled text without constraints
    schemas   the same rows, each under a JSON schema of its own    aim: 0.95 of plain, late <= 1 %
    slow      the same, and one row whose masks take 50 ms          aim: the others as in `schemas`
    arrivals  32 plain streams (--streams) while 200 requests come, plain ones and then schemas
                                                                    aim: p99 of their gaps + 10 %
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from constraints import vocabulary

from tokenpod.core.constraints import Choice, Constraint, ConstraintLimits, JsonSchema
from tokenpod.core.messages import EngineOptions, Vocabulary
from tokenpod.core.outputs import Load, StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.assemble import assemble
from tokenpod.engine.constraints.guidance import Guidance, GuidanceMatcher
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.loop import EngineLoop
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.service.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
_SLOW_SECONDS = 0.05


class SlowMatcher(GuidanceMatcher):
    """Takes 50 ms for each mask."""

    def copy(self) -> SlowMatcher:
        return SlowMatcher(self._matcher.deep_copy(), self._vocab)

    def take(self, token: int) -> None:
        time.sleep(_SLOW_SECONDS)
        super().take(token)


class Library(Guidance):
    """Choices are slow."""

    def compile(self, constraint: Constraint) -> GuidanceMatcher:
        made = super().compile(constraint)
        if isinstance(constraint, Choice):
            return SlowMatcher(made._matcher, made._vocab)
        return made


@dataclass
class Client:
    """The other end of the engine's link: hands requests in, times what comes out."""

    inbox: list[Any] = field(default_factory=list)
    #: When each sequence's tokens came.
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    left: set[int] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    load: Load | None = None

    def receive(self, seconds: float | None) -> list[Any]:
        if seconds and not self.inbox:
            time.sleep(min(seconds, 0.001))
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: object) -> None:
        assert isinstance(message, StepOutputs)
        now, self.load = time.perf_counter(), message.load
        for sequence, finish in zip(message.sequence_ids, message.finishes, strict=True):
            self.times[sequence].append(now)
            if finish:
                self.left.discard(sequence)
        for failure in message.failures:
            self.refused.append(failure.message)
            self.left.discard(failure.sequence_id)


class Bench:
    """An engine, its loop and its client."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        device = torch.device("cpu" if asked.cpu else "cuda")
        positions, prefill = (2048, 64) if asked.cpu else (8192, 4096)
        options = EngineOptions(
            model_folder="",
            dtype=None,
            device=device.type,
            threads=0,
            max_batch_size=max(asked.rows + 8, asked.streams + 208),
            max_batch_prefill_tokens=prefill,
        )
        model, tokenizer = _demo() if asked.cpu else _random(device)
        vocab = 4096 if asked.cpu else LLAMA_8B["vocab_size"]
        with torch.inference_mode():
            made = assemble(model, options, positions=positions, device=device)
        self.client = Client()
        limits = Limits(made.slots, made.room.rows, positions, prefill)
        masks = Masks(Library, vocab, ConstraintLimits())
        masked = MaskedSteps(masks, overlap=made.overlap)
        self.loop = EngineLoop(
            self.client, Scheduler(limits), made.executor, overlap=made.overlap, masked=masked
        )
        known = Tokenizer(tokenizer).token_bytes()
        assert known is not None
        self.client.inbox.append(Vocabulary(*known))
        self.next = 1

    def ask(self, constraint: Constraint | None, new: int) -> int:
        """Queue a request; its sequence."""
        number, self.next = self.next, self.next + 1
        self.client.inbox.append(
            Request(
                [number],
                [5 + number % 200] * 32,
                SamplingParams(do_sample=True, temperature=1.0, seed=number),
                StoppingParams(max_new_tokens=new),
                constraint=constraint,
            )
        )
        self.client.left.add(number)
        return number

    def run(self, wanted: set[int]) -> None:
        """Turn until these have ended."""
        with torch.inference_mode():
            while wanted & self.client.left:
                self.loop.turn()

    def gaps(self, sequences: list[int]) -> list[float]:
        """Milliseconds between tokens of these sequences."""
        times = [self.client.times[sequence] for sequence in sequences]
        return [(b - a) * 1e3 for each in times for a, b in pairwise(each)]


def schema(number: int) -> JsonSchema:
    """One of its own, whose texts are long."""
    properties = {
        "name": {"type": "string", "maxLength": 30},
        f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 10**6 + number},
        "tags": {"type": "array", "items": {"enum": ["red", "green", f"blue {number}"]}},
        "nested": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    }
    item = {"type": "object", "properties": properties, "required": list(properties)}
    return JsonSchema(json.dumps({"type": "array", "items": item, "minItems": 500}))


def rows(bench: Bench, name: str, constraints: list[Constraint | None]) -> float:
    """Tokens a second of the rows but the slow one's; prints a line."""
    before = bench.client.load.masks if bench.client.load else None
    new = bench.asked.new
    sequences = [bench.ask(constraint, new) for constraint in constraints]
    quick = [s for s, c in zip(sequences, constraints, strict=True) if not isinstance(c, Choice)]
    bench.run(set(quick))
    gaps = bench.gaps(quick)
    begin = max(bench.client.times[s][0] for s in quick)
    end = max(bench.client.times[s][-1] for s in quick)
    tokens = sum(t > begin for s in quick for t in bench.client.times[s])
    rate = tokens / (end - begin)
    told = ""
    if bench.client.load and before is not None:
        now = bench.client.load.masks
        needed, late = now.needed - before.needed, now.late - before.late
        if needed:
            took = (now.nanoseconds - before.nanoseconds) / needed / 1e3
            told = f"  late {late / needed:6.2%} of {needed} masks, {took:.0f} us each"
    median, p99 = statistics.median(gaps), float(np.percentile(gaps, 99))
    print(f"{name:9} {rate:9.0f} tok/s  gap {median:7.2f} ms  p99 {p99:7.2f} ms{told}", flush=True)
    bench.loop.scheduler.abort(sequences)
    assert bench.loop.masked is not None
    bench.loop.masked.forget(sequences)
    bench.client.left -= set(sequences)
    return rate


def arrivals(bench: Bench) -> None:
    """Requests come while streams run: plain ones, whose prompts cost steps too, then schemas."""
    streams = [bench.ask(None, 6 * bench.asked.new) for _ in range(bench.asked.streams)]
    times = bench.client.times
    with torch.inference_mode():
        while any(len(times[s]) < bench.asked.new for s in streams):
            bench.loop.turn()
        found = {"calm": bench.gaps(streams)}
        for kind in ("plain", "schemas"):
            for sequence in streams:
                times[sequence].clear()
            wanted = [None if kind == "plain" else schema(10_000 + i) for i in range(200)]
            # One token each: what is measured is their coming, and not a larger batch.
            new = {bench.ask(each, 1) for each in wanted}
            bench.run(new)
            found[kind] = bench.gaps(streams)
    for kind, gaps in found.items():
        median, p99 = np.percentile(gaps, (50, 99))
        print(
            f"arrivals  {kind:8} gaps of {len(streams)} streams: {median:7.2f} ms, p99 {p99:7.2f}"
        )


def _demo() -> tuple[Any, Any]:
    from tokenizers import Tokenizer as Backend

    folder = ROOT / "models" / "demo"
    model = load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
    )
    return model, Backend.from_file(str(folder / "tokenizer.json"))


def _random(device: torch.device) -> tuple[Any, Any]:
    from gpu import config_of, family_of, random_model

    made = random_model(
        family_of(LLAMA_8B),
        config_of(LLAMA_8B),
        device,
        argparse.Namespace(quantize="none", quantize_head=False),
    )
    return made, vocabulary(LLAMA_8B["vocab_size"])


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cpu", action="store_true", help="the embedded model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--new", type=int, default=256, help="tokens of each row")
    asked = parser.parse_args()
    if asked.cpu:  # a core is left to the workers
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) - 1, 1))
    bench = Bench(asked)
    rows(bench, "warm", [None] * asked.rows)
    rows(bench, "warm", [schema(i) for i in range(asked.rows)])
    plain = rows(bench, "plain", [None] * asked.rows)
    masked = rows(bench, "schemas", [schema(i) for i in range(asked.rows)])
    print(f"          {masked / plain:.3f} of plain")
    slow: list[Constraint | None] = [schema(i) for i in range(asked.rows - 1)]
    mixed = rows(bench, "slow", [*slow, Choice(("a" * 4000,))])
    share = mixed / (asked.rows - 1) / (masked / asked.rows)
    print(f"          {share:.3f} of `schemas` a row, beside one of 50 ms a mask")
    arrivals(bench)
    assert not bench.client.refused, bench.client.refused[0]


if __name__ == "__main__":
    main()
