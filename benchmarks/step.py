"""Time one step of the decoder on the CPU, with random weights, against what memory allows.

    python -P benchmarks/step.py --shape 160m --rows 1 16 --context 128 --chunk 256

For every row count it prints the fastest and the median decode step, its parts, and the share of
the limit: bytes of weights and KV that the step must read, at the read bandwidth measured in the
same round. Cases are interleaved round by round, so that a busy moment hits all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any

import torch

from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.compose import add_linear_of, norm_linear_of
from tokenpod.kernels.ops import Linear, Operations
from tokenpod.kernels.pool import KVPool
from tokenpod.kernels.registry import operations_for
from tokenpod.models.decoder import Decoder
from tokenpod.models.families.llama import LLAMA
from tokenpod.models.fields import Fields
from tokenpod.models.names import Names, weights_of
from tokenpod.models.spec import ModelSpec

CPU = torch.device("cpu")

#: name -> hidden, layers, heads, key/value heads, intermediate, vocabulary.
SHAPES = {
    "15m": (288, 6, 6, 6, 768, 8_192),
    "160m": (768, 12, 12, 4, 2_048, 32_000),
}


def config_of(shape: str) -> ModelSpec:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    return LLAMA.spec(
        Fields(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": vocabulary,
                "hidden_size": hidden,
                "intermediate_size": intermediate,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "max_position_embeddings": 4096,
                "torch_dtype": "float32",
            },
            "a benchmark's",
        ),
        None,
    )


def random_weights(config: ModelSpec) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {}
    for weight in weights_of(config, Names(), "model."):
        weights[weight.name] = torch.randn(weight.shape) * 0.02
    return weights


class Clock:
    """Wraps operations so that their time adds up by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def operations(self, ops: Operations) -> Operations:
        timed = {
            field.name: self._timed(field.name, getattr(ops, field.name))
            for field in fields(ops)
            if callable(getattr(ops, field.name))
        }

        def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            return self._timed("linear", ops.prepare_linear(weight, bias))

        return replace(
            ops,
            **timed
            | {
                "prepare_linear": prepare_linear,
                # Composed anew, so that their parts are timed.
                "prepare_norm_linear": norm_linear_of(
                    prepare_linear, timed["rms_norm"], timed["act_mul"]
                ),
                "prepare_add_linear": add_linear_of(prepare_linear),
            },
        )

    def _timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = operation(*args)
            self.seconds[name] += time.perf_counter() - began
            return result

        return timed


def make_batch(rows: int, tokens: int, context: int, shared: int) -> ForwardBatch:
    """Rows of `tokens` tokens each with `context` in all, `shared` of them one common run."""
    own = context - shared
    runs = []
    for row in range(rows):
        first = shared + row * own
        runs.append([(0, shared)] * (shared > 0) + [(first, first + own)])
    slots = [end - tokens + i for *_, (_, end) in runs for i in range(tokens)]
    table = torch.zeros((rows, context), dtype=torch.int32)
    return ForwardBatch(
        t_token=torch.randint(0, 8000, (rows * tokens,)),
        t_position=torch.arange(context - tokens, context).repeat(rows),
        t_slot=torch.tensor(slots),
        b_start=[row * tokens for row in range(rows + 1)],
        b_context=[context] * rows,
        b_runs=runs,
        b_row=list(range(rows)),
        row_table=table,
        single_rows=rows if tokens == 1 else 0,
        logit_index=torch.arange(tokens - 1, rows * tokens, tokens),
    )


@dataclass
class Case:
    """One step to time, again and again."""

    name: str
    batch: ForwardBatch
    #: Bytes that the step can't avoid reading.
    bytes_read: int


def read_bandwidth(buffer: torch.Tensor) -> float:
    began = time.perf_counter()
    buffer.sum()
    return buffer.nbytes / (time.perf_counter() - began)


def cases_of(config: ModelSpec, model: Decoder, options: argparse.Namespace) -> list[Case]:
    slot = KVPool.bytes_per_slot(
        layouts=config.kv_layouts,
        dtype=torch.float32,
    )
    weights = model.weight_bytes - config.vocab_size * config.hidden_size * 4
    cases = []
    for rows in options.rows:
        batch = make_batch(rows, 1, options.context, options.shared)
        cases.append(Case(f"decode {rows}", batch, weights + rows * options.context * slot))
    if options.chunk:
        batch = make_batch(1, options.chunk, options.chunk, 0)
        cases.append(Case(f"prefill {options.chunk}", batch, weights + options.chunk * slot))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="15m")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--shared", type=int, default=0, help="positions of a common prefix")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill; 0: none")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config, clock = config_of(options.shape), Clock()
    weights = random_weights(config)
    model = Decoder(config, dict(weights), operations_for(CPU, torch.float32))
    watched = Decoder(config, weights, clock.operations(operations_for(CPU, torch.float32)))
    cases = cases_of(config, model, options)
    pool = KVPool(
        slots=max(run[1] for case in cases for runs in case.batch.b_runs for run in runs),
        layouts=config.kv_layouts,
        dtype=torch.float32,
        device=CPU,
    )
    buffer = torch.ones(32 << 20)
    steps, bandwidths = defaultdict(list), []
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        bandwidths.append(read_bandwidth(buffer))
        for case in cases:
            began = time.perf_counter()
            model.logits(model.forward(case.batch, pool)[case.batch.logit_index])
            steps[case.name].append(time.perf_counter() - began)
            clock.seconds.clear()
            watched.logits(watched.forward(case.batch, pool)[case.batch.logit_index])
            parts[case.name].append(dict(clock.seconds))
    bandwidth = max(bandwidths)
    print(f"{options.shape}, context {options.context}, read {bandwidth / 1e9:.1f} GB/s at best")
    for case in cases:
        least, limit = min(steps[case.name]), case.bytes_read / bandwidth
        line = " ".join(
            f"{part} {min(p[part] for p in parts[case.name]) * 1e3:.2f}"
            for part in sorted(parts[case.name][0], key=lambda p: -parts[case.name][0][p])
        )
        median = statistics.median(steps[case.name])
        print(
            f"{case.name:12s} {least * 1e3:7.2f} ms (median {median * 1e3:.2f}), "
            f"{limit / least:4.0%} of the limit | {line}"
        )


if __name__ == "__main__":
    main()
