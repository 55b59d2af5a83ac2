"""What weights of fewer bits cost: bits per byte of held-out text under the demo model.

    python benchmarks/weight_quality.py

Each format by how its weights come about: made while loading, written by `tokenpod quantize` (to
the nearest, and by GPTQ on modules that the model was trained on), in a checkpoint of a layout of
others, packed as the tests pack it, or as their rules round. Computed by the operations that are
the specification (torch, on a CPU, float32).
Text and windows are those of kv_quality.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
# `python -P` leaves them out
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests/support")]

from kv_quality import CPU, DEMO, bits, make_pool  # noqa: E402
from packers import Tensors, awq_tensors, gptq_tensors  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from support.corpus import split, standard_library  # noqa: E402

from tokenpod.kernels import reference  # noqa: E402
from tokenpod.kernels.formats.fp8 import MOST, Fp8Weight  # noqa: E402
from tokenpod.kernels.formats.grouped import GroupedWeight, packed_pairs  # noqa: E402
from tokenpod.kernels.formats.int8 import Int8Weight  # noqa: E402
from tokenpod.kernels.formats.rounding import Number, Rounding  # noqa: E402
from tokenpod.kernels.weight import LinearWeight, QuantisedWeight  # noqa: E402
from tokenpod.models import load as loading  # noqa: E402
from tokenpod.models import mxfp4 as microscaling  # noqa: E402
from tokenpod.models.checkpoint import Checkpoint  # noqa: E402
from tokenpod.models.decoder import Decoder  # noqa: E402
from tokenpod.models.folder import read_layout  # noqa: E402
from tokenpod.models.quantise.calibrate import Calibration, tokens_of  # noqa: E402
from tokenpod.models.quantise.job import Job, quantise  # noqa: E402
from tokenpod.models.quantise.rounding import least_change  # noqa: E402
from tokenpod.models.quantise.targets import Target  # noqa: E402
from tokenpod.models.reading import read_weights  # noqa: E402

#: The table of nf4, the 16 quantiles of a normal distribution (Dettmers et al. 2023, appendix E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def load(folder: Path, quantize: str | None = None) -> Decoder:
    """A model on the reference operations."""
    loading.operations_for = lambda device, dtype: reference.OPERATIONS
    model = loading.load_model(
        folder,
        dtype=torch.float32,
        device=CPU,
        progress=lambda done, total: None,
        quantize=quantize,
    )
    assert isinstance(model, Decoder)
    return model


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
            dense = weights[weight.name]
            assert isinstance(dense, torch.Tensor)
            made = make(dense)
            weights[weight.name] = made if isinstance(made, torch.Tensor) else LinearWeight((made,))
    return Decoder(layout.spec, weights, reference.OPERATIONS)


def w8a8(weight: torch.Tensor) -> QuantisedWeight:
    """Whole numbers on both sides, a scale per output and per token."""
    return replace(Int8Weight.made_of(weight), rounding=Rounding(Number.INT8))


def blocks(weight: torch.Tensor) -> QuantisedWeight:
    """e4m3 in blocks of 128 x 128, inputs in groups of 128, as DeepSeek V3."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    wide = torch.zeros((rows * 128, columns * 128))
    wide[: weight.shape[0], : weight.shape[1]] = weight
    scale = wide.view(rows, 128, columns, 128).abs().amax((1, 3)) / MOST
    each = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
    numbers = (weight / each[:, : weight.shape[1]]).to(torch.float8_e4m3fn)
    return Fp8Weight(numbers, scale, 128, 128, Rounding(Number.FP8, group=128))


def nf4(weight: torch.Tensor) -> QuantisedWeight:
    """The nearest of the table, in blocks of 64, as bitsandbytes without nested scales."""
    table = torch.tensor(_NF4)
    groups = weight.view(len(weight), -1, 64)
    scale = groups.abs().amax(2)
    shares = (groups / scale[:, :, None]).flatten(1)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(shares, between).to(torch.uint8)
    index = (torch.arange(weight.shape[1]) // 64).to(torch.int32)
    return GroupedWeight(packed_pairs(codes), scale, index, table=table)


def mxfp4(weight: torch.Tensor) -> QuantisedWeight:
    """The nearest of 4 bits with an exponent, in blocks of 32 that share a power of two.

    The scale is the largest number's power of two less that of the largest code, 4 (OCP
    Microscaling Formats, 2023, section 6.3).
    """
    groups = weight.view(len(weight), -1, microscaling.BLOCK)
    exponent = groups.abs().amax(2).clamp(min=2.0**-120).log2().floor() - 2
    shares = groups / torch.exp2(exponent)[:, :, None]
    positive = microscaling.VALUES[:8]
    codes = torch.bucketize(shares.abs(), (positive[1:] + positive[:-1]) / 2)
    codes = (codes + 8 * (shares < 0)).to(torch.uint8)
    blocks = codes[:, :, ::2] | codes[:, :, 1::2] << 4
    return microscaling.weight_of(blocks, (exponent + 127).to(torch.uint8))


def published(at: Path, text: Path, tokens: int) -> Iterator[tuple[str, Path]]:
    """Checkpoints of other projects' layouts: GPTQ's and AWQ's."""
    with Checkpoint(DEMO) as checkpoint:
        layout = read_layout(DEMO, checkpoint)
        run = Calibration(checkpoint, layout, tokens_of(DEMO, text, tokens), CPU)
        products = {w.name: w for w in layout.weights if w.multiplied}
        sums: dict[str, torch.Tensor] = {}
        for found in run.sums({name: w.shape[1] for name, w in products.items()}):
            sums |= found
        modules = {
            source.name.removesuffix(".weight"): (
                checkpoint.read(source.name).float(),
                sums[name],
            )
            for name, weight in products.items()
            for source in weight.sources
        }
        left = {
            name: checkpoint.read(name)
            for name in checkpoint.names
            if name.removesuffix(".weight") not in modules
        }

    def write(name: str, config: dict[str, object], made: dict[str, Tensors]) -> Path:
        folder = at / name
        folder.mkdir()
        whole = json.loads((DEMO / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))
        packed = {module + end: x for module, own in made.items() for end, x in own.items()}
        save_file(left | packed, folder / "model.safetensors")
        return folder

    for width in (2, 3, 4, 8):
        config = {"quant_method": "gptq", "bits": width, "group_size": 128, "sym": True}
        made = {name: _gptq(*of, width) for name, of in modules.items()}
        yield f"gptq: {width} bits, groups of 128", write(f"gptq-{width}", config, made)
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    made = {name: _awq(dense) for name, (dense, _) in modules.items()}
    yield "awq: 4 bits, groups of 128, nearest", write("awq", config | {"version": "gemm"}, made)


def _gptq(dense: torch.Tensor, second: torch.Tensor, width: int) -> Tensors:
    """Chosen by GPTQ, zeros in the middle."""
    target = Target("gptq", width, floating=False, group=128)
    numbers, scale = least_change(dense, second, target, torch.float16)
    middle = 1 << (width - 1)
    index = torch.arange(dense.shape[1]) // 128
    codes = (numbers.long() + middle).t()
    zero = torch.full_like(scale.t(), middle, dtype=torch.int64)
    return gptq_tensors(codes, zero, scale.t().contiguous(), index, bits=width)


def _awq(dense: torch.Tensor) -> Tensors:
    """The nearest of 16 numbers between the least and the largest of a group, zero among them."""
    groups = dense.view(len(dense), -1, 128)
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((most - least) / 15).half()
    zero = (-least / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float()[:, :, None]).round() + zero[:, :, None]
    numbers = codes.clamp(0, 15).flatten(1).long().t()
    return awq_tensors(numbers, zero.long().t(), scale.t().contiguous())


def written(at: Path, text: Path, tokens: int) -> Iterator[tuple[str, Path]]:
    """What `tokenpod quantize` makes of the demo model, if that is not what is made at load."""
    for form, group, chosen in (
        ("int4", 128, True),
        ("int4", 32, False),
        ("int4", 32, True),
        ("fp8", None, True),
    ):
        how = "GPTQ" if chosen else "nearest"
        name = f"{form}, groups of {group}" if group else form
        folder = at / f"{form}-{group}-{how}"
        folder.mkdir()
        calibrate = str(text) if chosen else None
        job = Job(str(DEMO), str(folder), form, group=group, calibrate=calibrate, tokens=tokens)
        quantise(job, lambda done, total: None)
        yield f"written: {name}, {how}", folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most-bytes", type=int, default=150_000, help="of text")
    parser.add_argument("--tokens", type=int, default=65_536, help="to calibrate with")
    arguments = parser.parse_args()
    trained, held_out = split(standard_library())
    scratch = Path(tempfile.mkdtemp())
    text = scratch / "text"
    # Every 40th module: a few of each package, whatever their names begin with.
    text.write_bytes(b"\n".join(list(trained.values())[::40]))
    models = {
        "float32": load(DEMO),
        "bfloat16": with_weights(lambda weight: weight.bfloat16().float()),
        **{f"made at load: {name}": load(DEMO, name) for name in ("int8", "fp8", "int4")},
        **{name: load(folder) for name, folder in written(scratch, text, arguments.tokens)},
        "int8 W8A8, a scale per token": with_weights(w8a8),
        "fp8, blocks of 128 x 128": with_weights(blocks),
        "nf4, blocks of 64": with_weights(nf4),
        "mxfp4, blocks of 32": with_weights(mxfp4),
        **{name: load(folder) for name, folder in published(scratch, text, arguments.tokens)},
    }
    shutil.rmtree(scratch)
    window = models["float32"].config.max_positions // 2
    pool = make_pool(models["float32"], window)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    count, totals = 0, dict.fromkeys(models, 0.0)
    for source in held_out.values():
        if count + len(source) > arguments.most_bytes:
            continue
        count += len(source)
        tokens = tokenizer.encode(source.decode()).ids
        for name, model in models.items():
            totals[name] += bits(model, pool, tokens, window)
    print(f"{count} bytes; bits per byte, and bytes of weights:")
    for name, total in totals.items():
        more = total / totals["float32"] - 1
        size = models[name].weight_bytes
        print(f"{name:40} {total / count:.4f} ({more:+.3%}) {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
