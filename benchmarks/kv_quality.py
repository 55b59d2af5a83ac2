"""What keys and values of fewer bits cost: bits per byte of held-out text under the demo model.

    python benchmarks/kv_quality.py

Every number goes through the pool, by the operations that are the specification (torch, on a CPU,
float32 but for the pool). Scales are found as the server finds them, with its random prompt. The
text is what the demo model never saw of the standard library, in windows of half its context, each
token scored with at least a quarter of the context before it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # `python -P` leaves it out

from support.corpus import split, standard_library  # noqa: E402

import tokenpod.models.demo  # noqa: E402
from tokenpod.engine.kv_scales import (  # noqa: E402
    EIGHT_BITS,
    PROMPT_TOKENS,
    measure_scales,
    random_prompt,
)
from tokenpod.kernels import reference  # noqa: E402
from tokenpod.kernels.attention_ops import KVScales  # noqa: E402
from tokenpod.kernels.batch import ForwardBatch  # noqa: E402
from tokenpod.kernels.ops import Operations  # noqa: E402
from tokenpod.kernels.pool import KVPool  # noqa: E402
from tokenpod.models import load as loading  # noqa: E402
from tokenpod.models.decoder import Decoder  # noqa: E402

DEMO = Path(tokenpod.models.demo.__file__).parent
CPU = torch.device("cpu")


def prompt_step(tokens: list[int]) -> ForwardBatch:
    """One row, whole, from slot 0 on."""
    count = len(tokens)
    places = torch.arange(count)
    return ForwardBatch(
        t_token=torch.tensor(tokens),
        t_position=places,
        t_slot=places,
        b_start=[0, count],
        b_context=[count],
        b_runs=[[(0, count)]],
        b_row=[0],
        row_table=places.to(torch.int32)[None],
        single_rows=0,
        logit_index=places,
    )


def make_pool(
    model: Decoder,
    slots: int,
    scales: KVScales | None = None,
    dtype: torch.dtype = torch.float32,
) -> KVPool:
    config = model.config
    return KVPool(
        slots=slots,
        layouts=config.kv_layouts,
        dtype=dtype if scales is None else EIGHT_BITS,
        device=CPU,
        scales=scales,
    )


def bits(model: Decoder, pool: KVPool, tokens: list[int], window: int) -> float:
    """To code all but the first of `tokens`."""
    total, scored = 0.0, 1
    for start in range(0, max(1, len(tokens) - window // 2), window // 2):
        part = tokens[start : start + window]
        logprobs = model.logits(model.forward(prompt_step(part[:-1]), pool)).log_softmax(-1)
        nats = -logprobs.gather(1, torch.tensor(part[1:])[:, None])
        total += nats[scored - start - 1 :].sum().item()
        scored = start + len(part)
    return total / math.log(2)


def rounded_store(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The definition's, its keys and values rounded."""

    def store(  # type: ignore[no-untyped-def]
        qkv, rotation, norm, keys, values, t_slot, scales=None
    ) -> torch.Tensor:
        q = reference.OPERATIONS.store_key_value(qkv, rotation, norm, keys, values, t_slot, scales)
        for pool in (keys, values):
            pool[t_slot] = pool[t_slot].to(dtype).float()
        return q

    return store


def load(ops: Operations) -> Decoder:
    """The demo model on these operations."""
    loading.operations_for = lambda device, dtype: ops
    return loading.load_model(
        DEMO, dtype=torch.float32, device=CPU, progress=lambda done, total: None
    )


def measured_scales(model: Decoder) -> KVScales:
    pool = make_pool(model, PROMPT_TOKENS)
    prompt = random_prompt(PROMPT_TOKENS, model.config.vocab_size)
    model.forward(prompt_step(prompt), pool)
    return measure_scales(pool, PROMPT_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most-bytes", type=int, default=150_000, help="of text")
    arguments = parser.parse_args()
    exact = load(reference.OPERATIONS)
    half = load(replace(reference.OPERATIONS, store_key_value=rounded_store(torch.bfloat16)))
    scales = measured_scales(exact)
    window = exact.config.max_positions // 2
    ones = KVScales(torch.ones_like(scales.keys), torch.ones_like(scales.values))
    cases = {
        "float32": (exact, make_pool(exact, window)),
        "bfloat16": (half, make_pool(exact, window)),
        "int8, a scale per token": (exact, make_pool(exact, window, dtype=torch.int8)),
        "float8_e4m3fn, measured scales": (exact, make_pool(exact, window, scales)),
        "float8_e4m3fn, scales of 1": (exact, make_pool(exact, window, ones)),
    }
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    count, totals = 0, dict.fromkeys(cases, 0.0)
    for source in split(standard_library())[1].values():
        if count + len(source) > arguments.most_bytes:
            continue
        count += len(source)
        tokens = tokenizer.encode(source.decode()).ids
        for name, (model, pool) in cases.items():
            totals[name] += bits(model, pool, tokens, window)
    print(f"{count} bytes; bits per byte:")
    for name, total in totals.items():
        more = total / totals["float32"] - 1
        print(f"{name:32} {total / count:.4f} ({more:+.3%})")
    for name, layers in scales._asdict().items():
        print(f"scales of {name}: {layers.min().item():.4g} to {layers.max().item():.4g}")


if __name__ == "__main__":
    main()
