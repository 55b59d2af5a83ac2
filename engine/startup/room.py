"""What the memory that is left holds: KV slots, and rows where models keep states of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.core.capacity import RowCosts, choose_rows, choose_slots, window_room
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions
from tokenpod.core.own_state import OwnState
from tokenpod.core.windows import WholeTokens, WindowRoom, longest
from tokenpod.engine.drafts.draft import DraftModel
from tokenpod.engine.startup.memory import FreeMemory, size
from tokenpod.kernels.cache.kv_pool import KVLayout, KVPool
from tokenpod.kernels.operations.group import Group
from tokenpod.models.decoders.facts import LoadedModel
from tokenpod.scheduler.sequences.work import SnapshotLimits


@dataclass(frozen=True, slots=True)
class Room:
    """How many slots and rows there are."""

    slots: int
    #: Sequences that can run at once.
    rows: int
    #: What `slots` was computed from, for the operator.
    slots_from: str
    #: The slots of layers with a window; None: these have all others' slots, or there are none.
    windows: WindowRoom | None = None
    #: Snapshots of rows' states.
    snapshots: int = 0
    #: How layers with a window keep tokens, for the operator; empty: there are none.
    windows_kept: str = ""

    @property
    def snapshot_limits(self) -> SnapshotLimits | None:
        """Of these; None: there are none."""
        return SnapshotLimits(self.snapshots, self.rows + 1) if self.snapshots else None

    @property
    def states(self) -> int:
        """Rows' states, a liveness probe's among them, and snapshots."""
        return self.rows + 1 + self.snapshots


def rows_for(
    model: LoadedModel,
    options: EngineOptions,
    positions: int,
    free: FreeMemory,
    dtype: torch.dtype,
    group: Group | None,
) -> int:
    """Sequences that run at once, as many as `free` holds well on every rank.

    `dtype`: of keys and values.
    """
    config = model.config
    costs = RowCosts.of(
        options,
        vocabulary=config.vocab_size,
        item_bytes=model.dtype.itemsize,
        positions=positions,
        slot=KVPool.bytes_per_slot(layouts=config.kv_layouts, dtype=dtype),
        window_slot=KVPool.bytes_per_slot(layouts=_in_windows(model), dtype=dtype),
        window=longest(config.kv_windows) if config.own_state is None else None,
        state=config.own_state.row_bytes if config.own_state else 0,
    )
    rows = choose_rows(costs, options, free.bytes)
    return rows if group is None else group.least(rows)


def room_for(
    model: LoadedModel,
    options: EngineOptions,
    positions: int,
    free: FreeMemory,
    dtype: torch.dtype,
    group: Group | None,
    draft: DraftModel | None = None,
) -> Room:
    """What fits into `free`, on every rank. Raises EngineError if too little does.

    `draft`: has keys and values at the same slots.
    """
    own, rows, snapshots = model.config.own_state, options.max_batch_size, 0
    windows: WindowRoom | WholeTokens | None = None
    slot_bytes = KVPool.bytes_per_slot(layouts=model.config.kv_layouts, dtype=dtype)
    if draft is not None:
        layouts = draft.config.kv_layouts
        slot_bytes += KVPool.bytes_per_slot(layouts=layouts, dtype=draft.dtype)
    if own is None:
        windows = _windows(model, options, positions, free, slot_bytes, group)
    else:
        rows, snapshots = _rows(own, options, free, group)
        slot_bytes += own.slot_bytes
        taken = own.taken(rows, options.memory_fraction, snapshots)
        free = free.less(taken, f"states of {rows} rows and {snapshots} snapshots take")
        if longest(model.config.kv_windows) is not None:
            windows = WholeTokens("since rows keep states, too")
    if isinstance(windows, WindowRoom):
        of_windows = KVPool.bytes_per_slot(layouts=_in_windows(model), dtype=dtype)
        slot_bytes -= of_windows
        taken = windows.taken(of_windows, options.memory_fraction)
        free = free.less(taken, f"{windows.slots} slots of layers with a window take")
    slots, slots_from = _slots(options, (rows, positions), free, slot_bytes, group)
    if own is not None:
        slots_from += f"; {rows} sequences at once, with {size(own.row_bytes)} of state each"
        if snapshots:
            slots_from += f", and {snapshots} snapshots of states for cached prefixes"
        if no_prefix_cache(options, own, snapshots) and options.prefix_caching:
            slots_from += f"; no prefixes are cached: {no_prefix_cache(options, own, snapshots)}"
    apart = windows if isinstance(windows, WindowRoom) else None
    return Room(slots, rows, slots_from, apart, snapshots, str(windows or ""))


def no_prefix_cache(options: EngineOptions, own: OwnState | None, snapshots: int) -> str:
    """Why prefixes of prompts are not cached, in words; empty: they are."""
    if not options.prefix_caching:
        return "switched off (--no-prefix-caching)"
    if own is None or snapshots:
        return ""
    if not own.pooled:
        return "rows have caches of their own"
    return "there is no memory for snapshots of rows' states"


def _windows(
    model: LoadedModel,
    options: EngineOptions,
    positions: int,
    free: FreeMemory,
    slot_bytes: int,
    group: Group | None,
) -> WindowRoom | WholeTokens | None:
    """The slots of layers with a window, if they are to be apart: on all ranks or on none."""
    whole = choose_slots(
        slot_bytes=slot_bytes,
        wanted=options.max_batch_total_tokens,
        most_useful=options.max_batch_size * positions,
        fraction=options.memory_fraction,
        free=free.bytes,
    )
    window = longest(model.config.kv_windows)
    windows = window_room(window, options, positions, whole)
    if window is None or group is None:
        return windows
    # Memory that is left differs a little from rank to rank.
    apart = isinstance(windows, WindowRoom)
    if not group.least(int(apart)) and apart:
        return WholeTokens("since on another rank that takes less memory")
    return windows


def _in_windows(model: LoadedModel) -> list[KVLayout]:
    """What layers with a window have for a token."""
    config = model.config
    layers = zip(config.kv_layouts, config.kv_windows, strict=True)
    return [layout for layout, window in layers if window is not None]


def _rows(
    own: OwnState, options: EngineOptions, free: FreeMemory, group: Group | None
) -> tuple[int, int]:
    """How many fit on every rank, and snapshots beside them. Raises EngineError if none does."""
    rows = own.rows(free.bytes, options.memory_fraction, options.max_batch_size)
    snapshots = 0
    if options.prefix_caching:
        snapshots = own.snapshots(free.bytes, options.memory_fraction, rows)
    if group is not None:
        rows, snapshots = group.least(max(rows, 0)), group.least(snapshots)
    if rows < 1:
        raise EngineError(
            f"a row's state takes {size(own.row_bytes)}: two rows, one of them for liveness probes,"
            f" do not fit into {options.memory_fraction:.0%} of the {size(free.bytes)} left "
            f"{free.source}"
        )
    return rows, snapshots


def _slots(
    options: EngineOptions,
    most: tuple[int, int],
    free: FreeMemory,
    slot_bytes: int,
    group: Group | None,
) -> tuple[int, str]:
    """How many, and what they were computed from. Raises EngineError if they don't fit.

    `most`: sequences that run at once, and their longest.
    """
    wanted = options.max_batch_total_tokens
    slots = choose_slots(
        slot_bytes=slot_bytes,
        wanted=wanted,
        most_useful=most[0] * most[1],
        fraction=options.memory_fraction,
        free=free.bytes,
    )
    mine = slots
    if group is not None:
        agreed = group.least(slots or 0)
        if agreed == 0 and slots is not None:
            raise EngineError(
                f"max_batch_total_tokens is {wanted}: another rank has no "
                "memory for so many keys and values"
            )
        slots = agreed or None
    if slots is None:
        raise EngineError(
            f"max_batch_total_tokens is {wanted}: its "
            f"{(wanted or 0) * slot_bytes / 2**30:.1f} GiB of keys and "
            f"values do not fit into {options.memory_fraction:.0%} of the {size(free.bytes)} left "
            f"{free.source}"
        )
    if slots != mine:
        return slots, "the rank that has least memory"
    if wanted is not None:
        return slots, "--max-batch-total-tokens"
    if slots == most[0] * most[1]:
        return slots, f"{most[0]} sequences of {most[1]} tokens, all that can be used"
    memory = f"{options.memory_fraction:.0%} of the {size(free.bytes)} left {free.source}"
    return slots, f"{memory}, {size(slot_bytes)} each"
