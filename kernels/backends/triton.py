"""The operations as Triton kernels, for NVIDIA GPUs of compute capability 8.0 and up."""

from dataclasses import replace
from functools import partial

import torch

from tokenpod.kernels.adapters.adapted import ADAPTED
from tokenpod.kernels.adapters.adapter_embeddings import adapt_rows
from tokenpod.kernels.adapters.adapter_heads import own_linear
from tokenpod.kernels.adapters.triton_adapters import adapt, plan_adapters
from tokenpod.kernels.attention.composed_latent import latent_of
from tokenpod.kernels.attention.triton_attention import attention, plan_attention, prepare_capture
from tokenpod.kernels.attention.triton_latent import absorbed, plan_tokens, store_latent
from tokenpod.kernels.attention.triton_texts import attend_texts, plan_texts
from tokenpod.kernels.cache.triton_rotary import rotate, store_key_value
from tokenpod.kernels.experts.triton_experts import prepare_experts
from tokenpod.kernels.gpu.launch import capability, shared_bytes
from tokenpod.kernels.mixers.recurrent_plan import plan_recurrent
from tokenpod.kernels.mixers.triton_convolution import short_convolution
from tokenpod.kernels.mixers.triton_delta import gated_delta
from tokenpod.kernels.mixers.triton_space import state_space
from tokenpod.kernels.operations.ops import AddLinear, Linear, Operations
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.reference_pointwise import embed
from tokenpod.kernels.pointwise.triton_pointwise import (
    act_mul,
    activate,
    add_layer_norm,
    layer_norm,
    rms_norm,
)
from tokenpod.kernels.products.agreement import agreeing
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.product_tiles import Tiles, deterministic
from tokenpod.kernels.products.quantised.format_products import PRODUCTS
from tokenpod.kernels.products.quantised.lanes import Lanes
from tokenpod.kernels.products.triton_product import (
    prepare_add_linear,
    prepare_linear,
    prepare_norm_linear,
    prepare_sum_linear,
)

plan_latent, attend_latent = latent_of(plan_attention, attention, plan_tokens, absorbed)

OPERATIONS = Operations(
    embed=embed,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    add_layer_norm=add_layer_norm,
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


def _in_one_sum(
    weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False, add: bool = False
) -> Tiles:
    device = weight.device
    tiles = deterministic(capability(device), shared_bytes(device), gated=gated)
    return replace(tiles, library=agreeing(weight, bias, tiles, add=add))


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return prepare_linear(weight, bias, _in_one_sum(weight, bias))


def _norm_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, norm: RowNorm, activation: Activation | None
) -> Linear:
    tiles = _in_one_sum(weight, bias, gated=activation is not None)
    return prepare_norm_linear(weight, bias, norm, activation, tiles)


def _add_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> AddLinear:
    return prepare_add_linear(weight, bias, _in_one_sum(weight, bias, add=True))


#: Those of dense products and attention whose results for a token depend on nothing but the token
#: and what it sees: not on how many rows a step has, which of them are prompts, or what was cached.
DETERMINISTIC = replace(
    OPERATIONS,
    rotate=partial(rotate, one_form=True),
    store_key_value=partial(store_key_value, one_form=True),
    attention=partial(attention, deterministic=True),
    prepare_linear=_linear,
    prepare_norm_linear=_norm_linear,
    prepare_add_linear=_add_linear,
    prepare_sum_linear=None,
    quantised={},
    adapted=None,
)
