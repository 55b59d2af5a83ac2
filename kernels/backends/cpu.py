"""The operations for a CPU: compiled loops where torch would need many calls.

Prompts' attention stays torch's: there a call has enough to do.
"""

from tokenpod.kernels.adapters.reference_adapters import (
    adapt,
    adapt_rows,
    own_linear,
    plan_adapters,
)
from tokenpod.kernels.attention.compiled_attention import attention, plan_attention
from tokenpod.kernels.attention.compiled_texts import attend_texts, plan_texts
from tokenpod.kernels.attention.composed_latent import latent_of
from tokenpod.kernels.attention.reference_latent import store_latent
from tokenpod.kernels.cache.compiled_rotary import rotate, store_key_value
from tokenpod.kernels.experts.cpu_experts import experts_of
from tokenpod.kernels.mixers.chunked_delta import gated_delta
from tokenpod.kernels.mixers.chunked_space import state_space
from tokenpod.kernels.mixers.convolution import plan_recurrent
from tokenpod.kernels.mixers.short_convolution import short_convolution
from tokenpod.kernels.operations.ops import FormatProducts, Operations
from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.pointwise.compiled_pointwise import act_mul, embed, rms_norm
from tokenpod.kernels.pointwise.reference_pointwise import activate, layer_norm
from tokenpod.kernels.products.compiled_tiles import available
from tokenpod.kernels.products.cpu_product import (
    prepare_activated_linear,
    prepare_add_linear,
    prepare_int4_linear,
    prepare_int8_linear,
    prepare_linear,
    prepare_norm_linear,
)
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.narrow import NarrowWeight

plan_latent, attend_latent = latent_of(plan_attention, attention)

#: Of formats of fewer bits that have a product of their own.
QUANTISED: dict[type[QuantisedWeight], FormatProducts] = {
    Int8Weight: FormatProducts(prepare_int8_linear),
    Int4Weight: FormatProducts(prepare_int4_linear),
}
if available():
    QUANTISED[NarrowWeight] = FormatProducts(
        prepare_linear, prepare_norm_linear, prepare_add_linear
    )

#: For weights of any float type.
OPERATIONS = Operations(
    embed=embed,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    rotate=rotate,
    store_key_value=store_key_value,
    plan_attention=plan_attention,
    attention=attention,
    plan_texts=plan_texts,
    attend_texts=attend_texts,
    store_latent=store_latent,
    plan_latent=plan_latent,
    attend_latent=attend_latent,
    plan_recurrent=plan_recurrent,
    gated_delta=gated_delta,
    state_space=state_space,
    short_convolution=short_convolution,
    act_mul=act_mul,
    activate=activate,
    prepare_linear=prepare_linear,
    prepare_activated_linear=prepare_activated_linear,
    prepare_norm_linear=prepare_norm_linear,
    prepare_add_linear=prepare_add_linear,
    prepare_experts=experts_of(prepare_linear, rms_norm, act_mul, activate, QUANTISED),
    plan_adapters=plan_adapters,
    adapt=adapt,
    adapt_rows=adapt_rows,
    own_linear=own_linear,
    quantised=QUANTISED,
)
