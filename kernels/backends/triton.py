"""The operations as Triton kernels, for NVIDIA GPUs of compute capability 8.0 and up."""

from tokenpod.kernels.formats.fp8 import Fp8Weight
from tokenpod.kernels.formats.grouped import GroupedWeight
from tokenpod.kernels.formats.int4 import Int4Weight
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.latent import latent_of
from tokenpod.kernels.ops import Operations
from tokenpod.kernels.triton.adapted import ADAPTED
from tokenpod.kernels.triton.adapter_embeddings import adapt_rows
from tokenpod.kernels.triton.adapter_heads import own_linear
from tokenpod.kernels.triton.adapters import adapt, plan_adapters
from tokenpod.kernels.triton.attention import attention, plan_attention, prepare_capture
from tokenpod.kernels.triton.experts import prepare_experts
from tokenpod.kernels.triton.latent import absorbed, plan_tokens, store_latent
from tokenpod.kernels.triton.pointwise import act_mul, activate, embed, layer_norm, rms_norm
from tokenpod.kernels.triton.product import (
    prepare_add_linear,
    prepare_linear,
    prepare_norm_linear,
    prepare_sum_linear,
)
from tokenpod.kernels.triton.quantised import PRODUCTS
from tokenpod.kernels.triton.quantised.lanes import Lanes
from tokenpod.kernels.triton.rotary import rotate, store_key_value

plan_latent, attend_latent = latent_of(plan_attention, attention, plan_tokens, absorbed)

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
    prepare_norm_linear=prepare_norm_linear,
    prepare_add_linear=prepare_add_linear,
    prepare_experts=prepare_experts,
    plan_adapters=plan_adapters,
    adapt=adapt,
    adapt_rows=adapt_rows,
    own_linear=own_linear,
    adapted=ADAPTED,
    quantised={
        Int8Weight: PRODUCTS,
        Fp8Weight: PRODUCTS,
        Int4Weight: PRODUCTS,
        GroupedWeight: PRODUCTS,
        Lanes: PRODUCTS,
    },
    prepare_sum_linear=prepare_sum_linear,
    prepare_capture=prepare_capture,
)
