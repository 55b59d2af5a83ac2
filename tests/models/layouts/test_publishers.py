"""Modules that the publishing projects' own packages have packed, beside what those unpack again.

packers.py writes these layouts anew; here nothing is ours but the reading.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from support.checkpoints.packers import Module, Source
from support.checkpoints.published import dense_of, make_pair, read
from tokenpod.models.weights.shard import Shard

PER_TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}


def compressed(
    form: str, source: Source, outputs: int, inputs: int, *, weights: dict[str, Any]
) -> Module:
    """A module by compressed-tensors, and the weight that it decompresses."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    weight = torch.randn((outputs, inputs), generator=source.generator) * 0.1
    rows = weight
    match weights["strategy"]:
        case "tensor":
            rows = weight.reshape(1, 1, -1)
        case "group":
            rows = weight.unflatten(1, (-1, weights["group_size"]))
        case _:
            rows = weight[:, None]
    scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), args)
    if weights["strategy"] == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    packer = BaseCompressor.get_value_from_registry(form)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    made = packer.compress(state, scheme)
    whole = packer.decompress({name: each.clone() for name, each in made.items()}, scheme)
    return Module({f".{name}": each for name, each in made.items()}, whole["weight"].float())


def by_groups(form: str, *, inputs: dict[str, Any] | None = None, **weights: Any) -> Any:
    """A config and what makes its modules."""
    weights = {"type": "int", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return config, partial(compressed, form, weights=weights)


COMPRESSED = {
    "packed-4": by_groups("pack-quantized", num_bits=4, strategy="group", group_size=64),
    "packed-4-zeros": by_groups(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "packed-4-channel": by_groups("pack-quantized", num_bits=4, strategy="channel"),
    "packed-8": by_groups("pack-quantized", num_bits=8, strategy="channel"),
    "int8": by_groups("int-quantized", num_bits=8, strategy="channel"),
    "w8a8": by_groups("int-quantized", num_bits=8, strategy="channel", inputs=PER_TOKEN),
    "fp8-tensor": by_groups("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "fp8-channel": by_groups(
        "float-quantized",
        num_bits=8,
        type="float",
        strategy="channel",
        inputs=PER_TOKEN | {"type": "float"},
    ),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_what_compressed_tensors_packs_is_read(name, tmp_path):
    alike(tmp_path, *COMPRESSED[name])


def nf4(source: Source, outputs: int, inputs: int, *, kind: str, nested: bool) -> Module:
    """A module as bitsandbytes saves it, and what it makes of that again."""
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn((outputs, inputs), generator=source.generator) * 0.1
    module = bnb.nn.Linear4bit(
        inputs, outputs, bias=False, quant_type=kind, compress_statistics=nested
    )
    module.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type=kind, compress_statistics=nested
    )
    module = module.to("cpu")
    whole = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return Module({f".{name}": each for name, each in module.state_dict().items()}, whole)


def int8(source: Source, outputs: int, inputs: int) -> Module:
    """The same of 8 bits."""
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn((outputs, inputs), generator=source.generator) * 0.1
    numbers, scale, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    whole = bnb.functional.int8_vectorwise_dequant(numbers, scale)
    return Module({".weight": numbers, ".SCB": scale}, whole)


@pytest.mark.parametrize(
    ("config", "module"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"kind": "nf4", "nested": False}),
        (
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
            },
            {"kind": "nf4", "nested": True},
        ),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, {"kind": "fp4", "nested": False}),
        ({"load_in_8bit": True}, None),
    ],
    ids=["nf4", "nf4-nested", "fp4", "int8"],
)
def test_what_bitsandbytes_packs_is_read(config, module, tmp_path):
    made = int8 if module is None else partial(nf4, **module)
    alike(tmp_path, {"quant_method": "bitsandbytes", **config}, made)


def alike(folder, config, module):
    pair = make_pair(folder, config, module)
    for shard in (Shard(), Shard(1, 2), Shard(3, 4)):
        packed, dense = read(pair.packed, shard), read(pair.dense, shard)
        for key, weight in packed.items():
            torch.testing.assert_close(
                dense_of(weight), dense[key], rtol=1e-6, atol=1e-7, msg=f"{key} of {shard}"
            )
