"""The operations as plainly as possible, for any device: the specification of all others."""

from tokenpod.kernels.adapters.reference_adapters import (
    adapt,
    adapt_rows,
    own_linear,
    plan_adapters,
)
from tokenpod.kernels.attention.composed_latent import latent_of
from tokenpod.kernels.attention.reference_attention import attention, plan_attention
from tokenpod.kernels.attention.reference_latent import store_latent
from tokenpod.kernels.attention.reference_texts import attend_texts, plan_texts
from tokenpod.kernels.cache.reference_rotary import rotate, store_key_value
from tokenpod.kernels.experts.reference_experts import prepare_experts
from tokenpod.kernels.mixers.convolution import plan_recurrent
from tokenpod.kernels.mixers.reference_delta import gated_delta
from tokenpod.kernels.mixers.reference_space import state_space
from tokenpod.kernels.mixers.short_convolution import one_by_one as short_convolution
from tokenpod.kernels.operations.compose import add_linear_of, norm_linear_of
from tokenpod.kernels.operations.ops import Operations
from tokenpod.kernels.pointwise.reference_pointwise import (
    act_mul,
    activate,
    embed,
    layer_norm,
    rms_norm,
)
from tokenpod.kernels.products.reference_product import prepare_linear

plan_latent, attend_latent = latent_of(plan_attention, attention)

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
    prepare_norm_linear=norm_linear_of(prepare_linear, rms_norm, act_mul),
    prepare_add_linear=add_linear_of(prepare_linear),
    prepare_experts=prepare_experts,
    plan_adapters=plan_adapters,
    adapt=adapt,
    adapt_rows=adapt_rows,
    own_linear=own_linear,
)
