"""The operations as Triton kernels, for NVIDIA GPUs of compute capability 8.0 and up."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokenpod.kernels.adapters.adapted import ADAPTED
from tokenpod.kernels.adapters.adapter_embeddings import adapt_rows
from tokenpod.kernels.adapters.adapter_heads import own_linear
from tokenpod.kernels.adapters.triton_adapters import adapt, plan_adapters
from tokenpod.kernels.attention.composed_latent import latent_of
from tokenpod.kernels.attention.triton_attention import attention, plan_attention, prepare_capture
from tokenpod.kernels.attention.triton_latent import absorbed, plan_tokens, store_latent
from tokenpod.kernels.cache.triton_rotary import rotate, store_key_value
from tokenpod.kernels.experts.triton_experts import prepare_experts
from tokenpod.kernels.gpu.launch import shared_bytes
from tokenpod.kernels.mixers.recurrent_plan import plan_recurrent
from tokenpod.kernels.mixers.triton_convolution import short_convolution
from tokenpod.kernels.mixers.triton_delta import gated_delta
from tokenpod.kernels.mixers.triton_space import state_space
from tokenpod.kernels.operations.ops import Operations
from tokenpod.kernels.pointwise.triton_pointwise import (
    act_mul,
    activate,
    embed,
    layer_norm,
    rms_norm,
)
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.product_tiles import deterministic
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
    rotate=rotate,
    store_key_value=store_key_value,
    plan_attention=plan_attention,
    attention=attention,
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


def _one_form(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """The same with tiles that all multiply and sum in one way."""

    def prepare_in_one_form(weight: torch.Tensor, *others: Any) -> Any:
        return prepare(weight, *others, tiles=deterministic(shared_bytes(weight.device)))

    return prepare_in_one_form


#: Those of dense products and attention whose results for a token depend on nothing but the token
#: and what it sees: not on how many rows a step has, which of them are prompts, or what was cached.
DETERMINISTIC = replace(
    OPERATIONS,
    rotate=partial(rotate, one_form=True),
    store_key_value=partial(store_key_value, one_form=True),
    attention=partial(attention, deterministic=True),
    prepare_linear=_one_form(prepare_linear),
    prepare_norm_linear=_one_form(prepare_norm_linear),
    prepare_add_linear=_one_form(prepare_add_linear),
    prepare_sum_linear=None,
    quantised={},
    adapted=None,
)
