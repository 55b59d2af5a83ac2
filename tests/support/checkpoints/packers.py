"""Quantised modules as other projects write them, written anew after their packers.

Each function makes a module's tensors, by the endings of their names, from whole numbers and
scales, and what these stand for, computed from the numbers and not from the tensors.

Sources: GPTQ: `pack` of auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, AutoGPTQ 9f7d3707, and
zeros that are not less one in GPTQModel f4c327a1 ("gptq_v2"). AWQ: `from_linear` of
awq/modules/linear/gemm.py, AutoAWQ 88e4c76b. compressed-tensors: `pack_to_int32` and `compress` of
pack_quantized, commit 52792be0; numbers of 4 bits with an exponent after what vLLM reads (its
schemes W4A16 of NVFP4 and MXFP4).
bitsandbytes 0.50.2: `Params4bit`, `Int8Params`, `QuantState`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
from torch.nn import functional

Tensors = dict[str, torch.Tensor]


@dataclass
class Module:
    """A module as stored, and its weight."""

    tensors: Tensors
    #: [out, in] float32
    weight: torch.Tensor


@dataclass
class Source:
    """Random numbers, the same for the same seed."""

    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def whole(self, most: int, *shape: int, least: int = 0) -> torch.Tensor:
        return torch.randint(least, most + 1, shape, generator=self.generator)

    def scale(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.rand(shape, generator=self.generator) * 0.02 + 0.005).to(dtype)

    def order(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.generator)


def in_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers [n, columns] -> [n · bits / 32, columns] int32.

    Number j of a column begins at bit j · bits: what the loops of AutoGPTQ's packer come to, for 3
    bits too, where they put the bits that did not fit into the next word.
    """
    n, columns = numbers.shape
    own = numbers.long()[:, None] >> torch.arange(bits)[:, None] & 1
    column = functional.pad(own.reshape(n * bits, columns), (0, 0, 0, -n * bits % 32))
    words = (column.view(-1, 32, columns) << torch.arange(32)[:, None]).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(
    source: Source,
    outputs: int,
    inputs: int,
    *,
    bits: int = 4,
    group: int = -1,
    version: int = 1,
    symmetric: bool = False,
    act_order: bool = False,
) -> Module:
    """`version` 1 has zeros less one."""
    size = inputs if group == -1 else group
    groups = -(-inputs // size)
    numbers = source.whole((1 << bits) - 1, inputs, outputs)
    zero = source.whole((1 << bits) - 1, groups, outputs)
    if symmetric:
        zero = torch.full_like(zero, 1 << (bits - 1))
    scale = source.scale(groups, outputs, dtype=torch.float16)
    index = torch.arange(inputs) // size
    if act_order:
        index = index[source.order(inputs)]
    weight = (numbers - zero[index]) * scale.float()[index]
    tensors = gptq_tensors(numbers, zero, scale, index, bits=bits, version=version)
    return Module(tensors, weight.t().contiguous())


def gptq_tensors(
    numbers: torch.Tensor,
    zero: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor,
    *,
    bits: int,
    version: int = 1,
) -> Tensors:
    """Of numbers [in, out], zeros and scales [groups, out], and the group of each input [in]."""
    stored = (zero - 1) % (1 << bits) if version == 1 else zero
    return {
        ".qweight": in_words(numbers, bits),
        ".qzeros": in_words(stored.t(), bits).t().contiguous(),
        ".scales": scale,
        ".g_idx": index.to(torch.int32),
    }


def awq(
    source: Source,
    outputs: int,
    inputs: int,
    *,
    group: int = 128,
    symmetric: bool = False,
    stored: bool = True,
) -> Module:
    """Without zeros of their own all are 8, and may not be `stored`."""
    size = inputs if group == -1 else group
    groups = -(-inputs // size)
    numbers, zero = source.whole(15, inputs, outputs), source.whole(15, groups, outputs)
    scale = source.scale(groups, outputs, dtype=torch.float16)
    index = torch.arange(inputs) // size
    zero = torch.full_like(zero, 8) if symmetric else zero
    weight = (numbers - zero[index]) * scale.float()[index]
    tensors = awq_tensors(numbers, zero, scale)
    if not stored:
        del tensors[".qzeros"]
    return Module(tensors, weight.t().contiguous())


def awq_tensors(numbers: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> Tensors:
    """Of numbers [in, out] of 4 bits, zeros and scales [groups, out]."""

    def packed(values: torch.Tensor) -> torch.Tensor:
        words = torch.zeros((len(values), values.shape[1] // 8), dtype=torch.int64)
        for column in range(words.shape[1]):
            for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[:, column] |= values[:, 8 * column + output] << 4 * place
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    return {".qweight": packed(numbers), ".qzeros": packed(zero), ".scales": scale}


def packed(
    source: Source,
    outputs: int,
    inputs: int,
    *,
    bits: int = 4,
    group: int | None = None,
    symmetric: bool = True,
    act_order: bool = False,
) -> Module:
    """compressed-tensors' pack-quantized."""
    size = group or inputs
    groups, half = -(-inputs // size), 1 << (bits - 1)
    numbers = source.whole(half - 1, outputs, inputs, least=-half)
    zero = torch.zeros((outputs, groups), dtype=torch.int64)
    if not symmetric:
        zero = source.whole(half - 1, outputs, groups, least=-half)
    scale = source.scale(outputs, groups, dtype=torch.bfloat16)
    index = torch.arange(inputs) // size
    if act_order:
        index = index[source.order(inputs)]
    tensors = {
        ".weight_packed": in_words(numbers.t() + half, bits).t().contiguous(),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = in_words(zero + half, bits)
    if act_order:
        tensors[".weight_g_idx"] = index.to(torch.int32)
    return Module(tensors, (numbers - zero[:, index]) * scale.float()[:, index])


def signed(
    source: Source,
    outputs: int,
    inputs: int,
    *,
    strategy: str = "channel",
    group: int | None = None,
    symmetric: bool = True,
    static: bool = False,
) -> Module:
    """compressed-tensors' int-quantized."""
    size = group or inputs
    groups = -(-inputs // size)
    index = torch.arange(inputs) // size
    numbers = source.whole(127, outputs, inputs, least=-128)
    shape = (1, 1) if strategy == "tensor" else (outputs, groups)
    scale, zero = source.scale(*shape), torch.zeros(shape, dtype=torch.int64)
    if not symmetric:
        zero = source.whole(127, *shape, least=-128)
    weight = (numbers - zero[:, index]) * scale[:, index]
    stored = scale.reshape(-1) if strategy == "tensor" else scale
    tensors = {".weight": numbers.to(torch.int8), ".weight_scale": stored.contiguous()}
    if not symmetric:
        tensors[".weight_zero_point"] = zero.to(torch.int8)
    if static:
        tensors[".input_scale"] = source.scale(1)
    return Module(tensors, weight)


def floats(
    source: Source,
    outputs: int,
    inputs: int,
    *,
    block: tuple[int | None, int | None] = (None, None),
    scales: str = ".weight_scale",
    scalar: bool = False,
    static: bool = False,
    inputs_scale: str = ".input_scale",
) -> Module:
    """e4m3 numbers; `block` (None, None) is one scale, (1, None) one per output."""
    numbers = torch.randn((outputs, inputs), generator=source.generator)
    numbers = (numbers * 50).to(torch.float8_e4m3fn)
    rows, columns = block[0] or outputs, block[1] or inputs
    scale = source.scale(-(-outputs // rows), -(-inputs // columns))
    wide = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    stored = scale.reshape(() if scalar else (1,)) if block == (None, None) else scale
    tensors = {".weight": numbers, scales: stored}
    if static:
        tensors[inputs_scale] = source.scale(1).reshape(() if scalar else (1,))
    return Module(tensors, numbers.float() * wide)


#: What codes of e2m1 stand for: sign, two bits of exponent, one of fraction.
E2M1 = torch.tensor([s * v for s in (1, -1) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])


def float4(source: Source, outputs: int, inputs: int, *, kind: str) -> Module:
    """compressed-tensors' nvfp4-pack-quantized and mxfp4-pack-quantized."""
    codes, size = source.whole(15, outputs, inputs), 16 if kind == "nvfp4" else 32
    tensors = {".weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    if kind == "nvfp4":
        stored = (source.scale(outputs, inputs // size) * 1000).to(torch.float8_e4m3fn)
        whole = source.scale(1) * 100_000
        tensors |= {".weight_global_scale": whole, ".input_global_scale": source.scale(1)}
        scale = stored.float() / whole
    else:
        stored = source.whole(124, outputs, inputs // size, least=117).to(torch.uint8)
        scale = 2.0 ** (stored.float() - 127)
    tensors[".weight_scale"] = stored
    return Module(tensors, E2M1[codes] * scale.repeat_interleave(size, 1))


def nf4(source: Source, outputs: int, inputs: int, *, nested: bool = False) -> Module:
    """The table is any: files bring their own."""
    table = torch.linspace(-1, 1, 16)
    codes = source.whole(15, outputs * inputs)
    blocks = outputs * inputs // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
    tensors = {
        ".weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        ".weight.quant_map": table,
    }
    if nested:
        own, second = torch.linspace(-1, 1, 256), source.scale(-(-blocks // 256))
        short = source.whole(255, blocks)
        offset = 1.25
        most = own[short] * second.repeat_interleave(256)[:blocks] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors[".weight.absmax"] = short.to(torch.uint8)
        tensors[".weight.nested_absmax"] = second
        tensors[".weight.nested_quant_map"] = own
    else:
        most = source.scale(blocks)
        tensors[".weight.absmax"] = most
    text = json.dumps(state).encode()
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    weight = table[codes] * most.repeat_interleave(64)
    return Module(tensors, weight.view(outputs, inputs))


def int8_rows(source: Source, outputs: int, inputs: int) -> Module:
    """bitsandbytes' LLM.int8()."""
    numbers, most = source.whole(127, outputs, inputs, least=-127), source.scale(outputs)
    tensors = {
        ".weight": numbers.to(torch.int8),
        ".SCB": most,
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Module(tensors, numbers * (most / 127)[:, None])
