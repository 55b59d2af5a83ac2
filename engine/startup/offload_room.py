"""Room in the host's memory for keys and values that the pool has none for."""

from __future__ import annotations

import torch

from tokenpod.core.capacity import BLOCK, offload_slots
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.drafts.draft import DraftModel
from tokenpod.engine.startup.memory import free_memory, size
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.offload_pool import OffloadPool
from tokenpod.kernels.operations.group import Group
from tokenpod.models.decoders.facts import LoadedModel


def check_offload_room(options: EngineOptions) -> None:
    """Raise EngineError if `--host-kv-bytes` is more than there is, before anything is loaded."""
    if problem := _lacking(options.host_kv_bytes):
        raise EngineError(f"--host-kv-bytes is {options.host_kv_bytes}: {problem}")


def _lacking(asked: int) -> str:
    """Why there are not so many bytes; empty if there are."""
    free = free_memory(torch.device("cpu"))
    return f"{size(free.bytes)} are free {free.source}" if asked > free.bytes else ""


def make_offload_pool(
    model: LoadedModel,
    options: EngineOptions,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None,
    draft: DraftModel | None = None,
) -> OffloadPool | None:
    """This rank's part of `--host-kv-bytes`; None: there is none.

    All ranks have as many slots. Those of a machine share what is given for it.

    Args:
        model: on `device`.
        options: the operator's.
        dtype: of the pool's numbers.
        device: a GPU copies by itself, to and from memory that is locked.
        group: the ranks that share the model, if it is divided.
        draft: its draft model, whose keys and values go along.

    Raises:
        EngineError: there is not so much memory, on some rank; or the model keeps states by row.
    """
    asked = options.host_kv_bytes
    if not asked:
        return None
    config, flag = model.config, f"--host-kv-bytes is {asked}"
    if config.own_state is not None:
        raise EngineError(
            f"{flag}: {config.architecture} keeps a state for each row, not keys and values"
        )
    slot_bytes = KVPool.bytes_per_slot(layouts=config.kv_layouts, dtype=dtype)
    if draft is not None:
        slot_bytes += KVPool.bytes_per_slot(layouts=draft.config.kv_layouts, dtype=draft.dtype)
    ranks = group.local_ranks if group else 1
    slots = offload_slots(asked, ranks, slot_bytes)
    problem = _lacking(asked)
    if not problem and not slots:
        problem = f"{BLOCK} tokens take {size(BLOCK * slot_bytes * ranks)}"
    if group is not None:  # no rank goes on alone
        slots = group.least(0 if problem else slots)
    if problem or not slots:
        raise EngineError(f"{flag}: {problem or 'another rank has no room for it'}")
    try:
        return OffloadPool(slots, slot_bytes, pinned=device.type == "cuda")
    except RuntimeError as error:
        raise EngineError(f"{flag}: the memory can't be locked ({error})") from None
