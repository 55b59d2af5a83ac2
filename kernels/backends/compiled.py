"""The CPU's operations in float32 and bfloat16: compiled loops where torch would need many calls.

Products, prompts' attention and embedding stay torch's: there a call has enough to do.
"""

from dataclasses import replace

from tokenpod.kernels import cpu
from tokenpod.kernels.compose import norm_linear_of
from tokenpod.kernels.cpu.compiled.attention import attention, plan_attention
from tokenpod.kernels.cpu.compiled.pointwise import act_mul, rms_norm
from tokenpod.kernels.cpu.compiled.rotary import store_key_value
from tokenpod.kernels.cpu.experts import experts_of
from tokenpod.kernels.cpu.product import prepare_linear
from tokenpod.kernels.latent import latent_of

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
