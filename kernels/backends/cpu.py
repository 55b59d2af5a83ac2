"""The operations for a CPU: few calls, views of contiguous KV runs, products by row count.

In float32 and bfloat16, loops that are compiled at run time (`compiled/`) take the place of what
costs torch one call per row. In float16, which those loops don't read, torch's calls stay.
"""

import torch

from tokenpod.kernels.compose import add_linear_of, norm_linear_of
from tokenpod.kernels.cpu.attention import attention, plan_attention
from tokenpod.kernels.cpu.experts import experts_of
from tokenpod.kernels.cpu.pointwise import act_mul, activate, embed, layer_norm, rms_norm
from tokenpod.kernels.cpu.product import prepare_int4_linear, prepare_int8_linear, prepare_linear
from tokenpod.kernels.cpu.rotary import rotate, store_key_value
from tokenpod.kernels.formats.int4 import Int4Weight
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.latent import latent_of
from tokenpod.kernels.ops import FormatProducts, Operations
from tokenpod.kernels.reference.adapters import (
    adapt,
    adapt_rows,
    own_linear,
    plan_adapters,
)
from tokenpod.kernels.reference.latent import store_latent
from tokenpod.kernels.weight import QuantisedWeight

plan_latent, attend_latent = latent_of(plan_attention, attention)

#: Of formats of fewer bits that have a product of their own.
QUANTISED: dict[type[QuantisedWeight], FormatProducts] = {
    Int8Weight: FormatProducts(prepare_int8_linear),
    Int4Weight: FormatProducts(prepare_int4_linear),
}

#: For weights of any float type.
OPERATIONS = Operations(
    embed=embed,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    rotate=rotate,
    store_key_value=store_key_value,
    plan_attention=plan_attention,
    attention=attention,
    store_latent=store_latent,
    plan_latent=plan_latent,
    attend_latent=attend_latent,
    act_mul=act_mul,
    activate=activate,
    prepare_linear=prepare_linear,
    prepare_norm_linear=norm_linear_of(prepare_linear, rms_norm, act_mul),
    prepare_add_linear=add_linear_of(prepare_linear),
    prepare_experts=experts_of(prepare_linear, rms_norm, act_mul, QUANTISED),
    plan_adapters=plan_adapters,
    adapt=adapt,
    adapt_rows=adapt_rows,
    own_linear=own_linear,
    quantised=QUANTISED,
)


def operations_for(dtype: torch.dtype) -> Operations:
    """The fastest operations for weights of `dtype`."""
    if dtype not in (torch.float32, torch.bfloat16):
        return OPERATIONS
    # Not above: the compiler takes its time to load, and its loops are built on this package.
    from tokenpod.kernels.cpu import compiled

    return compiled.OPERATIONS
