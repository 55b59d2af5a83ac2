"""What weights, keys and values of fewer bits cost the demo model: bits per byte of held-out text.

Computed by the operations that are the specification (torch, on a CPU, float32 but for what is
rounded). Formats of weights are made while loading, written by `tokenpod quantize` (to the nearest,
and by GPTQ on modules that the model was trained on), or rounded by the rules of published formats.
Every key and value goes through the pool; their scales are found as the server finds them. The text
is cut into windows of half the model's context, each token scored with at least a quarter of the
context before it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.support.models import FORMATS
from benchmarks.support.report import Report
from tokenpod.engine.startup.kv_scales import (
    EIGHT_BITS,
    PROMPT_TOKENS,
    measure_scales,
    random_prompt,
)
from tokenpod.kernels.backends import reference
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import KVScales
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.weight import LinearWeight, QuantisedWeight
from tokenpod.models import load as loading
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.folder import read_layout
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.quantise.job import Job, quantise
from tokenpod.service.pod.model_store import resolve_model

CPU = torch.device("cpu")
DEMO = resolve_model("demo", None)
SMOKE = {
    "cpu": "--most-bytes 2500 --tokens 256 --parts kv",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="*", choices=["weights", "kv"], default=["weights", "kv"])
    parser.add_argument("--most-bytes", type=int, default=30_000, help="of text")
    parser.add_argument("--tokens", type=int, default=16_384, help="to calibrate with")


def run(asked: argparse.Namespace, report: Report) -> None:
    exact = load()
    cases: dict[str, tuple[Decoder, KVPool]] = {"float32": (exact, pool_of(exact))}
    if "kv" in asked.parts:
        cases |= pools(exact)
    if "weights" in asked.parts:
        with tempfile.TemporaryDirectory() as scratch:
            for name, model in models(Path(scratch), asked.tokens):
                cases[name] = (model, cases["float32"][1])
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    window, count = exact.config.max_positions // 2, 0
    totals = dict.fromkeys(cases, 0.0)
    for source in standard_library()[1].values():
        if count + len(source) > asked.most_bytes:
            continue
        count += len(source)
        tokens = tokenizer.encode(source.decode()).ids
        for name, (model, pool) in cases.items():
            totals[name] += bits(model, pool, tokens, window)
    for name, total in totals.items():
        report.row(
            f"{count:,} bytes of held-out text",
            format=name,
            bits_a_byte=total / count,
            more_share=total / totals["float32"] - 1,
            weights_MB=cases[name][0].weight_bytes / 1e6,
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


def prompt_step(tokens: list[int]) -> ForwardBatch:
    """One row, whole, from slot 0 on."""
    count = len(tokens)
    places = torch.arange(count)
    return ForwardBatch(
        t_token=torch.tensor(tokens),
        t_place=places,
        t_slot=places,
        b_start=[0, count],
        b_context=[count],
        b_runs=[[(0, count)]],
        b_row=[0],
        row_table=places.to(torch.int32)[None],
        single_rows=0,
        logit_index=places,
    )


def load(folder: Path = DEMO, quantize: str | None = None) -> Any:
    """A model on the reference operations."""
    loading.operations_for = lambda device: reference.OPERATIONS
    return loading.load_model(
        folder,
        dtype=torch.float32,
        device=CPU,
        progress=lambda done, total: None,
        quantize=quantize,
    )


def pool_of(model: Decoder, dtype: torch.dtype = torch.float32, **more: Any) -> KVPool:
    """Of half the model's context."""
    slots, layouts = model.config.max_positions // 2, model.config.kv_layouts
    return KVPool(slots=slots, layouts=layouts, dtype=dtype, device=CPU, **more)


def pools(exact: Decoder) -> dict[str, tuple[Decoder, KVPool]]:
    """The model with pools of fewer bits."""
    pool = pool_of(exact)
    prompt = random_prompt(PROMPT_TOKENS, exact.config.vocab_size)
    exact.forward(prompt_step(prompt), pool)
    scales = measure_scales(pool, PROMPT_TOKENS)
    ones = [KVScales(*map(torch.ones_like, layer)) for layer in scales]
    return {
        "KV int8, a scale per token": (exact, pool_of(exact, torch.int8)),
        "KV e4m3, measured scales": (exact, pool_of(exact, EIGHT_BITS, scales=scales)),
        "KV e4m3, scales of 1": (exact, pool_of(exact, EIGHT_BITS, scales=ones)),
    }


def models(scratch: Path, tokens: int) -> Iterator[tuple[str, Decoder]]:
    """The model in each format."""
    yield "bfloat16", with_weights(lambda weight: weight.bfloat16().float())
    for name in ("int8", "fp8", "int4"):
        yield f"made at load: {name}", load(quantize=name)
    text = scratch / "text"
    # Every 40th module: a few of each package, whatever their names begin with.
    text.write_bytes(b"\n".join(list(standard_library()[0].values())[::40]))
    for form, group, gptq in (("int4", 128, True), ("int4", 32, False), ("int4", 32, True)):
        folder = scratch / f"{form}-{group}-{gptq}"
        folder.mkdir()
        calibrate = str(text) if gptq else None
        job = Job(str(DEMO), str(folder), form, group=group, calibrate=calibrate, tokens=tokens)
        quantise(job, lambda done, total: None)
        how = "GPTQ" if gptq else "nearest"
        yield f"written: {form}, groups of {group}, {how}", load(folder)
    for kind in ("int8-rounded", "fp8-blocks", "nf4", "mxfp4"):
        yield kind, with_weights(FORMATS[kind])


def with_weights(make: Callable[[torch.Tensor], QuantisedWeight | torch.Tensor]) -> Decoder:
    """The demo model, its products' weights made so of the dense ones."""
    with Checkpoint(DEMO) as checkpoint:
        layout = read_layout(DEMO, checkpoint)
        weights = read_weights(
            checkpoint,
            layout.weights,
            dtype=torch.float32,
            device=CPU,
            progress=lambda done, total: None,
        )
    for weight in layout.weights:
        if weight.multiplied:
            made = make(weights[weight.name])  # type: ignore[arg-type]
            weights[weight.name] = made if isinstance(made, torch.Tensor) else LinearWeight((made,))
    return Decoder(layout.spec, weights, reference.OPERATIONS)


_EXCLUDED = ("site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3.tests.data")
#: The demo model's training left out the modules whose names' hashes this divides.
_HELD_OUT_ONE_IN = 28


def standard_library() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Sources by module: those of the demo model's training, and those that were held out."""
    root = Path(sysconfig.get_path("stdlib"))
    trained: dict[str, bytes] = {}
    held_out: dict[str, bytes] = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if any(name == part or name.startswith(part + ".") for part in _EXCLUDED):
            continue
        source = path.read_bytes()
        try:
            source.decode("utf-8")
            with warnings.catch_warnings(action="ignore"):
                compile(source, name, "exec", dont_inherit=True)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        if source.strip():
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
            (trained if number % _HELD_OUT_ONE_IN else held_out)[name] = source
    known = set(trained.values())
    return trained, {name: each for name, each in held_out.items() if each not in known}
