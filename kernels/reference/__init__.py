"""The operations as plainly as possible, for any device: the specification of all others."""

from tokenpod.kernels.ops import Operations
from tokenpod.kernels.reference.attention import attention, plan_attention
from tokenpod.kernels.reference.pointwise import act_mul, add_rms_norm, embed, rms_norm
from tokenpod.kernels.reference.product import prepare_linear
from tokenpod.kernels.reference.rotary import rotate, store_key_value

OPERATIONS = Operations(
    embed=embed,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotate=rotate,
    store_key_value=store_key_value,
    plan_attention=plan_attention,
    attention=attention,
    act_mul=act_mul,
    prepare_linear=prepare_linear,
)
