"""The CPU's operations in float32 and bfloat16: compiled loops where torch would need many calls.

Products, prompts' attention and embedding stay torch's: there a call has enough to do.
"""

from dataclasses import replace

from tokenpod.kernels.attention.compiled_attention import attention, plan_attention
from tokenpod.kernels.attention.composed_latent import latent_of
from tokenpod.kernels.backends import cpu
from tokenpod.kernels.cache.compiled_rotary import store_key_value
from tokenpod.kernels.experts.cpu_experts import experts_of
from tokenpod.kernels.operations.compose import norm_linear_of
from tokenpod.kernels.pointwise.compiled_pointwise import act_mul, rms_norm
from tokenpod.kernels.products.cpu_product import prepare_linear

plan_latent, attend_latent = latent_of(plan_attention, attention)

OPERATIONS = replace(
    cpu.OPERATIONS,
    rms_norm=rms_norm,
    store_key_value=store_key_value,
    plan_attention=plan_attention,
    attention=attention,
    plan_latent=plan_latent,
    attend_latent=attend_latent,
    act_mul=act_mul,
    prepare_norm_linear=norm_linear_of(prepare_linear, rms_norm, act_mul),
    prepare_experts=experts_of(prepare_linear, rms_norm, act_mul, cpu.QUANTISED),
)
