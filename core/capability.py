"""What GPUs can do, by their compute capability: rules without torch, for forecasts too."""

from __future__ import annotations

Capability = tuple[int, int]

#: Older GPUs have neither bfloat16 nor asynchronous copies into shared memory.
LEAST_CAPABILITY: Capability = (8, 0)
#: GPUs that convert numbers of 8 bits (e4m3).
EIGHT_BIT_CAPABILITY: Capability = (8, 9)


def problem_of(name: str, capability: Capability) -> str | None:
    """What is wrong with a GPU of this compute capability, if anything."""
    if capability >= LEAST_CAPABILITY:
        return None
    return (
        f"{name} has compute capability {_text(capability)}; the kernels need "
        f"{_text(LEAST_CAPABILITY)} (Ampere) or newer: serve on the CPU (--device cpu)"
    )


def eight_bits_problem(kv_cache_dtype: str, capability: Capability | None) -> str | None:
    """Why there can't be keys and values of this type of 8 bits, if so; a CPU has no capability."""
    if kv_cache_dtype == "int8":
        if capability is None:
            return None
        return "kv_cache_dtype is int8: that is for CPUs, and this is a GPU (it reads fp8_e4m3)"
    asked = f"kv_cache_dtype is {kv_cache_dtype}: such keys and values need a GPU"
    if capability is None:
        return f"{asked}, and this is a CPU (it reads int8)"
    if capability >= EIGHT_BIT_CAPABILITY:
        return None
    return (
        f"{asked} of compute capability {_text(EIGHT_BIT_CAPABILITY)} or more, and this one has "
        f"{_text(capability)}"
    )


def _text(capability: Capability) -> str:
    return ".".join(map(str, capability))
