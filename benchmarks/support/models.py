"""Random models of published shapes: in memory, in every format of weights, and as checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.timing import DTYPE
from tokenpod.kernels.backends.registry import deterministic_operations, operations_for
from tokenpod.kernels.operations.weight import LinearWeight
from tokenpod.kernels.products.formats.fp8 import MOST, Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight, packed_pairs
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Number, Rounding
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.families import FAMILIES, Family
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.specs.weight_table import weights_of
from tokenpod.models.weights import mxfp4 as microscaling

Shape = dict[str, Any]
Weights = dict[str, "torch.Tensor | LinearWeight"]
_SHAPES = Path(__file__).resolve().parents[1] / "shapes.json"


def shape_names() -> list[str]:
    """Names in shapes.json."""
    return [
        name for name, each in json.loads(_SHAPES.read_text()).items() if isinstance(each, dict)
    ]


def shape_of(name: str) -> Shape:
    """The config.json of a published shape, by its name in shapes.json."""
    return dict(json.loads(_SHAPES.read_text())[name])


def first_layers(shape: Shape, layers: int) -> Shape:
    """The same with so few layers; 0: with all."""
    if not layers:
        return shape
    own = {**shape, "num_hidden_layers": layers}
    for name in ("layer_types", "hybrid_override_pattern"):
        if name in own:
            own[name] = own[name][:layers]
    if "full_attn_idxs" in own:
        own["full_attn_idxs"] = [i for i in own["full_attn_idxs"] if i < layers]
    return own


def family_of(shape: Shape) -> Family:
    """The family that reads this config.json."""
    return next(f for f in FAMILIES if shape["architectures"][0] in f.architectures)


def config_of(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> ModelSpec:
    """Our description of the shape."""
    told = {"torch_dtype": str(dtype).removeprefix("torch.")}
    return family_of(shape).spec(Fields({**told, **shape}, "a benchmark's"), None)


#: The table of nf4, the 16 quantiles of a normal distribution (Dettmers et al. 2023, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def _blocks(weight: torch.Tensor) -> Any:
    """e4m3 in blocks of 128 x 128, inputs in groups of 128, as DeepSeek V3."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    wide = torch.zeros((rows * 128, columns * 128), device=weight.device)
    wide[: weight.shape[0], : weight.shape[1]] = weight
    scale = wide.view(rows, 128, columns, 128).abs().amax((1, 3)) / MOST
    each = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
    numbers = (weight / each[:, : weight.shape[1]]).to(torch.float8_e4m3fn)
    return Fp8Weight(numbers, scale, 128, 128, Rounding(Number.FP8, group=128))


def _nf4(weight: torch.Tensor) -> Any:
    """The nearest of the table, in blocks of 64, as bitsandbytes without nested scales."""
    table = torch.tensor(NF4, device=weight.device)
    groups = weight.view(len(weight), -1, 64)
    scale = groups.abs().amax(2)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize((groups / scale[:, :, None]).flatten(1), between).to(torch.uint8)
    index = (torch.arange(weight.shape[1], device=weight.device) // 64).to(torch.int32)
    return GroupedWeight(packed_pairs(codes), scale, index, table=table)


def _mxfp4(weight: torch.Tensor) -> Any:
    """The nearest of 4 bits with an exponent, in blocks of 32 that share a power of two.

    The scale is the largest number's power of two less that of the largest code, 4 (OCP
    Microscaling Formats, 2023, section 6.3).
    """
    groups = weight.view(len(weight), -1, microscaling.BLOCK)
    exponent = groups.abs().amax(2).clamp(min=2.0**-120).log2().floor() - 2
    shares = groups / torch.exp2(exponent)[:, :, None]
    positive = microscaling.VALUES[:8].to(weight.device)
    codes = torch.bucketize(shares.abs(), (positive[1:] + positive[:-1]) / 2)
    codes = (codes + 8 * (shares < 0)).to(torch.uint8)
    return microscaling.weight_of(
        codes[:, :, ::2] | codes[:, :, 1::2] << 4, (exponent + 127).to(torch.uint8)
    )


#: A weight [n, k] of a product in each format, made of a dense float32 one.
FORMATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bf16": lambda weight: weight.to(DTYPE),
    "int8": Int8Weight.made_of,
    "int8-rounded": lambda w: replace(Int8Weight.made_of(w), rounding=Rounding(Number.INT8)),
    "fp8": Fp8Weight.made_of,
    "fp8-blocks": _blocks,
    "int4": Int4Weight.made_of,
    "groups8": GroupedWeight.made_of,
    "mxfp4": _mxfp4,
    "nf4": _nf4,
}


def quantised(weights: Weights, config: ModelSpec, kind: str, *, head: bool) -> Weights:
    """The same weights with those of products in a format of FORMATS, the head's too if `head`."""
    found = dict(weights)
    for weight in _named(config):
        dense = weights[weight.name]
        if (weight.multiplied or (head and weight.name == "head")) and dense.ndim == 2:  # type: ignore[union-attr]
            found[weight.name] = LinearWeight((FORMATS[kind](dense.float()),))  # type: ignore[union-attr]
    return found


def _named(config: ModelSpec) -> Any:
    family = next(f for f in FAMILIES if config.architecture in f.architectures)
    return weights_of(config, family.names_of(config)[0], "")


def random_weights(
    shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Weights:
    """By our names."""
    torch.manual_seed(0)
    weights: Weights = {}
    for weight in _named(config_of(shape, dtype)):
        # A token's own features outweigh what layers add: else routers send all rows one way.
        spread = 8 if weight.name == "embedding" else 0.02
        made = torch.empty(weight.shape, device=device, dtype=weight.dtype or dtype)
        made.normal_(0, spread)
        if weight.experts:
            made = made.view(weight.experts, -1, *weight.shape[1:])
        weights[weight.name] = made if made.ndim > 1 else made.add_(1)
    return weights


def random_model(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    quantize: str = "none",
    quantize_head: bool = False,
    change: Callable[[Weights], None] = lambda weights: None,
    drafts: int = 0,
    weights: Weights | None = None,
    deterministic: bool = False,
) -> Decoder:
    """A decoder of random weights, which `change` may alter; then they are quantised.

    `drafts`: so many of a row may be wrong; `weights`: these instead, which others may share.
    """
    config = config_of(shape, dtype)
    weights = random_weights(shape, device, dtype) if weights is None else dict(weights)
    change(weights)
    if quantize != "none":
        weights = quantised(weights, config, quantize, head=quantize_head)
    ops = deterministic_operations() if deterministic else operations_for(device)
    return Decoder(replace(config, drafts=drafts), weights, ops)


def make_checkpoint(folder: Path, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint of Llama's names with random weights, and a tokenizer with its vocabulary.

    Nothing is done where the folder has a config.json.
    """
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(size, device=device, dtype=dtype) * 0.02).cpu()

    hidden, inner, vocabulary = (
        shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    query, key = (
        shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    sizes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    parts: list[dict[str, torch.Tensor]] = [
        {
            "model.embed_tokens.weight": draw(vocabulary, hidden),
            "lm_head.weight": draw(vocabulary, hidden),
            "model.norm.weight": torch.ones(hidden, dtype=dtype),
        }
    ]
    for layer in range(shape["num_hidden_layers"]):
        if layer % 4 == 0:
            parts.append({})
        prefix = f"model.layers.{layer}."
        for name, size in sizes.items():
            parts[-1][f"{prefix}{name}.weight"] = draw(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            parts[-1][f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=dtype)
    index = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file)
        index.update(dict.fromkeys(part, file))
    listed = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    make_tokenizer(folder, vocabulary)
    told = {"torch_dtype": str(dtype).removeprefix("torch."), "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**told, **shape}))
    if device == "cuda":
        torch.cuda.empty_cache()  # a pod beside this process takes what is free
    return folder


def make_tokenizer(folder: Path, vocabulary: int) -> None:
    """A byte-level tokenizer with so many words, most of them never used."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"tok{i}" for i in range(vocabulary - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(alphabet + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
