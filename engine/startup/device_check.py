"""Whether a device, and a model on it, can be served: found out before minutes are spent."""

from __future__ import annotations

import torch

from tokenpod.core.capability import problem_of
from tokenpod.core.step_limits import StepLimits
from tokenpod.engine.startup.assemble import EngineError
from tokenpod.models.decoders.facts import ModelFacts

#: Programs that CUDA takes along y of a grid.
MOST_IN_Y = 65_535


def check_device(device: torch.device) -> None:
    """Raise EngineError, in one line, if `device` is not there or too old."""
    if device.type != "cuda":
        return
    if torch.version.cuda is None:
        raise EngineError(
            f"device is cuda, but torch {torch.__version__} is built without CUDA: "
            "install a CUDA build, or serve on the CPU (--device cpu)"
        )
    if not torch.cuda.is_available():
        raise EngineError("device is cuda, but torch finds no usable NVIDIA GPU and driver")
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise EngineError(f"device is cuda:{index}, but this machine shows {count} GPUs")
    problem = problem_of(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
    if problem is not None:
        raise EngineError(problem)


def check_step(limits: StepLimits) -> None:
    """Raise EngineError, in one line, if a step may be too large for a GPU.

    Kernels have a program for each row or tile of tokens in y, where a grid has fewer than in x.
    """
    if limits.tokens > MOST_IN_Y:
        raise EngineError(
            f"a step may have {limits.tokens:,} tokens: {limits.prompt:,} of prompts "
            f"(--max-batch-prefill-tokens), {limits.rows:,} rows (--max-batch-size) and "
            f"{limits.drafts:,} drafts; on a GPU it has at most {MOST_IN_Y:,}"
        )


def check_attention(facts: ModelFacts) -> None:
    """Raise EngineError, in one line, if the GPU's kernels can't handle a model's attention."""
    for heads, kv in set(zip(facts.head_counts, facts.kv_layouts, strict=True)):
        if kv.shared:
            check_latent(kv.value_dim, kv.key_dim - kv.value_dim)
        else:
            check_heads(heads, kv.heads, max(kv.key_dim, kv.value_dim))


def check_latent(rank: int, rope: int) -> None:
    """Raise EngineError if latents are too long for the GPU's kernels, or their keys."""
    from tokenpod.kernels.attention.triton_latent import LARGEST_RANK, LARGEST_ROPE

    if rank > LARGEST_RANK or rope > LARGEST_ROPE:
        raise EngineError(
            f"the model's latent rows have {rank} + {rope} numbers; on a GPU at most "
            f"{LARGEST_RANK} + {LARGEST_ROPE} are handled"
        )


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Raise EngineError, in one line, if the GPU's kernels can't handle such heads."""
    from tokenpod.kernels.attention.triton_attention import LARGEST_GROUP, LARGEST_HEAD_DIM

    if head_dim > LARGEST_HEAD_DIM:
        raise EngineError(
            f"the model's heads have {head_dim} features; on a GPU at most {LARGEST_HEAD_DIM} are "
            "handled"
        )
    if heads // kv_heads > LARGEST_GROUP:
        raise EngineError(
            f"{heads} query heads share {kv_heads} key/value heads; on a GPU at most "
            f"{LARGEST_GROUP} share one"
        )
