"""Products of tokens with a weight of their adapter's own: heads that adapters bring whole.

The grid depends on numbers of tokens, outputs and slots alone. Programs of a slot that no token
has, or that has no weight, read nothing but that: so a captured step pays for heads that are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched

#: Outputs of a program, inputs that it reads at once, and tokens, at most.
OUTPUTS, INPUTS, MOST_TOKENS = 64, 128, 64


def own_linear(
    x: torch.Tensor, weights: torch.Tensor, t_adapter: torch.Tensor, has: torch.Tensor
) -> torch.Tensor:
    """Products of x [T, in] with each token's adapter's own weight. Rows of x are contiguous."""
    tokens, (slots, outputs, inputs) = len(x), weights.shape
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    block = max(16, min(triton.next_power_of_2(tokens), MOST_TOKENS))
    _own_linear[(triton.cdiv(outputs, OUTPUTS), slots, triton.cdiv(tokens, block))](
        x,
        weights,
        t_adapter,
        has,
        y,
        tokens,
        outputs,
        inputs,
        x.stride(0),
        weights.stride(0),
        TOKENS=block,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        num_warps=4,
        **launch_options(x.device),
    )
    return y


@launched
@triton.jit(do_not_specialize=["tokens"])
def _own_linear(
    x,
    weights,
    t_adapter,
    has,
    y,
    tokens,
    outputs,
    inputs,
    x_stride,
    slot_stride,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`OUTPUTS` outputs of the tokens, among `TOKENS`, that one slot has."""
    await_inputs(OVERLAP)
    slot = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    there = tl.load(t_adapter + token, mask=token < tokens, other=0) == slot + 1
    there = there & (tl.load(has + slot) > 0)
    if tl.sum(there.to(tl.int32), axis=0) > 0:
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = output < outputs
        rows = weights + slot.to(tl.int64) * slot_stride + output.to(tl.int64)[:, None] * inputs
        own = x + token[None, :] * x_stride
        total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for start in range(0, inputs, INPUTS):
            k = start + tl.arange(0, INPUTS)
            a = tl.load(rows + k[None, :], mask=inside[:, None] & (k[None, :] < inputs), other=0.0)
            b = tl.load(own + k[:, None], mask=there[None, :] & (k[:, None] < inputs), other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        at = y + token.to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(at, total.to(y.dtype.element_ty), mask=there[None, :] & inside[:, None])
