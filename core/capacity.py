"""What fits into a device's memory: arithmetic over counts and bytes, without torch.

The engine sizes its pool with `choose_slots`; `tokenpod size` estimates the result before.

    memory of a device
    |--- weights ---|--- reserve ---|--- KV slots ---|--- rest ---|
                                    |<--------- free ------------>|
                                    |<- fraction --->|
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.model_size import ITEM_BYTES, Footprint, dtype_of, positions_of
from tokenpod.core.step_limits import StepLimits
from tokenpod.core.windows import WholeTokens, WindowRoom

GIB = 1 << 30
MIB = 1 << 20

#: Tokens that are kept together in the host's memory.
BLOCK = 64
#: Pieces of a GPU's memory through which copies to the host's and from it go, and their bytes.
STAGING_PIECES, STAGING_BYTES = 5, 64 * MIB

#: What a CUDA context, the libraries' workspaces and the compiled kernels take.
_CUDA_CONTEXT = GIB // 2
#: What the processes of the engine and of a front end take on a CPU: 0.5 GiB were measured, and a
#: tokenizer of a large vocabulary comes on top.
_CPU_PROCESSES = 3 * GIB // 4
#: Steps of all sizes leave gaps: a GPU keeps one part in so many of the largest step for them.
GAPS = 16
#: Drafts of all sequences together in a step, at most.
MOST_DRAFTS = 256
#: Rows for which a device finds drafts before their step is planned: so many at most.
MOST_AHEAD = 16
#: By how many fewer rows are tried, how many there are at least, and the tokens that each must have
#: room for.
_ROWS_APART, _LEAST_ROWS, _ROW_TOKENS = 64, 64, 256
#: Of the memory that may be used, rows' windows take a half at most, and their states a quarter;
#: with fewer rows than that, windows would make a pod slower than whole texts.
_WINDOWS_SHARE, _STATES_SHARE, _LEAST_WINDOWED = 2, 4, 128
#: A GPU's sampler keeps so many bytes for each row and vocabulary entry, counts, and takes so many
#: more while it draws, candidates.
_COUNT_BYTES, _CANDIDATE_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What sequences that run at once take of a GPU, in bytes."""

    #: Of a row, whatever it runs, and of that what is its state.
    row: int
    state: int
    #: Of a token in all layers, and in those with a window.
    slot: int
    window_slot: int
    #: The longest window of any layer; None: none has one.
    window: int | None
    #: Longest sequence, in tokens.
    positions: int

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        *,
        vocabulary: int,
        item_bytes: int,
        positions: int,
        slot: int,
        window_slot: int,
        window: int | None,
        state: int,
    ) -> RowCosts:
        """`vocabulary`: entries of a row of logits; `item_bytes`: of an activation."""
        logits = logits_each(options) * (item_bytes + ITEM_BYTES["float32"])
        table = positions * ITEM_BYTES["float32"] * (2 if window is not None else 1)
        row = vocabulary * (logits + _COUNT_BYTES + _CANDIDATE_BYTES) + table + state
        return cls(row, state, slot, window_slot, window, positions)


def choose_rows(costs: RowCosts, options: EngineOptions, free: int) -> int:
    """How many sequences run at once where nobody has said it: `max_batch_size` at most.

    As many as leave room for a text each: rows' own memory, states and windows, is a part of the
    whole, and of the rest each has `_ROW_TOKENS` tokens. Windows lie apart only if enough rows can
    have theirs; else all layers hold whole texts, whose number tokens alone limit.

    `free`: bytes beside the weights.
    """
    usable = int(max(free, 0) * options.memory_fraction)
    sizes = range(options.max_batch_size, _LEAST_ROWS, -_ROWS_APART)
    if costs.window is not None and not options.host_kv_bytes:
        prompt = options.max_batch_prefill_tokens + PROBE_TOKENS
        for rows in sizes:
            room = WindowRoom(costs.window, 0).for_rows(rows + 1, costs.positions, prompt)
            windows = room.slots * costs.window_slot
            others = costs.slot - costs.window_slot
            enough = rows >= _LEAST_WINDOWED and windows <= usable // _WINDOWS_SHARE
            if enough and _holds(rows, usable - windows, others, costs, options):
                return rows
    fitting = (rows for rows in sizes if _holds(rows, usable, costs.slot, costs, options))
    return next(fitting, min(_LEAST_ROWS, options.max_batch_size))


def _holds(
    rows: int, usable: int, slot_bytes: int, costs: RowCosts, options: EngineOptions
) -> bool:
    """Whether so many bytes hold rows' own memory, and a text for each."""
    if rows * costs.state > usable // _STATES_SHARE:
        return False
    left = usable - rows * costs.row
    tokens = left // slot_bytes if slot_bytes else rows * costs.positions
    if options.max_batch_total_tokens is not None:
        tokens = min(tokens, options.max_batch_total_tokens)
    return left > 0 and tokens >= rows * min(_ROW_TOKENS, costs.positions)


def choose_slots(
    *,
    slot_bytes: int,
    wanted: int | None,
    most_useful: int,
    fraction: float,
    free: int,
) -> int | None:
    """KV slots to make.

    Args:
        slot_bytes: memory of one slot in all layers.
        wanted: what the operator asked for; None: as many as fit, up to `most_useful`.
        most_useful: more than every row at full length can never be used.
        fraction: share of the free memory that the pool may take.
        free: bytes of it.

    Returns:
        The number, or None if `wanted` does not fit. PROBE_TOKENS more fit as well.
    """
    fits = most_useful
    if slot_bytes:  # else all layers have a window, or keep nothing
        fits = int(max(free, 0) * fraction) // slot_bytes - PROBE_TOKENS
    if wanted is not None:
        return wanted if not slot_bytes or wanted <= fits else None
    return max(min(fits, most_useful), 1)


def window_room(
    window: int | None, options: EngineOptions, positions: int, whole: int | None
) -> WindowRoom | WholeTokens | None:
    """Slots of layers with a window apart from those of others, if that takes less memory.

    None: no layer has one.

    Args:
        window: the longest of any layer; None: none has one.
        options: of the engine. What goes to the host's memory has all layers.
        positions: longest sequence, in tokens.
        whole: slots that there would be in all layers; None: those asked for don't fit.
    """
    if window is None:
        return None
    if options.host_kv_bytes:
        return WholeTokens("which the host's memory holds (--host-kv-bytes)")
    limits = step_limits(options)
    room = WindowRoom(window, 0).for_rows(limits.rows, positions, limits.prompt)
    whole = whole or options.max_batch_total_tokens or 0
    if room.slots < whole + PROBE_TOKENS:
        return room
    return WholeTokens(
        f"since windows of {limits.rows} rows would take {room.slots} slots, and there are {whole} "
        "in all (--max-batch-size)"
    )


def offload_slots(asked: int, ranks: int, slot_bytes: int) -> int:
    """Tokens that host memory holds, in whole blocks.

    Args:
        asked: bytes for all ranks of a machine together.
        ranks: of that machine.
        slot_bytes: memory of one slot in all layers of one rank.
    """
    return asked // ranks // slot_bytes // BLOCK * BLOCK if slot_bytes else 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one rank's device holds, in bytes and KV slots."""

    ranks: int
    memory: int
    weights: int
    #: What is neither weights nor keys and values, by what it is for.
    reserve: dict[str, int]
    slot_bytes: int
    #: None: the slots that were asked for don't fit.
    slots: int | None
    #: Slots without which the server can't do its work.
    least_slots: int
    #: Sequences that run at once, at most.
    rows: int
    #: Bytes of a sequence's state beside its slots.
    row_bytes: int = 0
    #: The slots of layers with a window and bytes of each, which are part of the reserve; or why
    #: these are not apart. None: no layer has a window.
    windows: WindowRoom | WholeTokens | None = None
    window_bytes: int = 0

    @property
    def window_slots(self) -> int:
        """Slots of layers with a window, where these are apart."""
        return self.windows.slots if isinstance(self.windows, WindowRoom) else 0

    @property
    def reserved(self) -> int:
        """Bytes of the whole reserve."""
        return sum(self.reserve.values())

    @property
    def free(self) -> int:
        """Bytes beside weights and reserve; negative where even these don't fit."""
        return self.memory - self.weights - self.reserved

    @property
    def fits(self) -> bool:
        """Whether the server can run."""
        if self.free <= 0 or self.rows < 1:
            return False
        return self.slots is not None and self.slots >= self.least_slots

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return (self.slots or 0) * self.slot_bytes


def capacity(
    model: Footprint,
    options: EngineOptions,
    *,
    memory: int,
    ranks: int,
    draft: Footprint | None = None,
) -> Capacity:
    """What each of `ranks` devices of `memory` bytes holds, a number in `portions`.

    `draft`: its draft model, of which each device has all.
    """
    dtype, positions = dtype_of(model, options), positions_of(model, options)
    item_bytes = ITEM_BYTES[dtype]
    on_cpu = options.device == "cpu"
    weights = model.weight_bytes(ranks, item_bytes, cpu=on_cpu)
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    own = model.states.get(item_bytes)
    if options.fewer_rows:
        costs = RowCosts.of(
            options,
            vocabulary=model.vocab_size,
            item_bytes=item_bytes,
            positions=positions,
            slot=model.slot_bytes(ranks, kv_dtype),
            window_slot=model.window_bytes(ranks, kv_dtype),
            window=model.window if own is None else None,
            state=own.row_bytes if own else 0,
        )
        rows = choose_rows(costs, options, memory - weights - _CUDA_CONTEXT)
        options = msgspec.structs.replace(options, max_batch_size=rows)
    reserve, rows = _reserve(model, options, item_bytes, ranks), options.max_batch_size
    if own is not None:
        free = memory - weights - sum(reserve.values())
        rows = own.rows(free, options.memory_fraction, rows)
        if rows > 0:
            snapshots = own.snapshots(free, options.memory_fraction, rows)
            reserve["states"] = own.taken(
                rows, options.memory_fraction, snapshots if options.prefix_caching else 0
            )
    if model.tower_numbers and options.image_cache_bytes is not None:
        reserve["image tower"] = model.tower_numbers * item_bytes
        reserve["an image"] = model.tower_working * item_bytes
        if options.device != "cpu":
            # Captured layers have memory of their own.
            reserve["captured layers"] = reserve["an image"]
    slot_bytes = model.slot_bytes(ranks, kv_dtype)
    if draft is not None:
        own_slot = draft.slot_bytes(1, dtype)
        spare = 0
        if options.device != "cpu":
            spare = spare_draft_slots(options.speculate, options.max_batch_size + 1)
        reserve["draft model"] = draft.weight_bytes(1, item_bytes, cpu=on_cpu) + spare * own_slot
        slot_bytes += own_slot

    def slots_of(slot_bytes: int) -> int | None:
        return choose_slots(
            slot_bytes=slot_bytes,
            wanted=options.max_batch_total_tokens,
            most_useful=max(rows, 1) * positions,
            fraction=options.memory_fraction,
            free=memory - weights - sum(reserve.values()),
        )

    slots, window_bytes = slots_of(slot_bytes), model.window_bytes(ranks, kv_dtype)
    windows = window_room(model.window, options, positions, slots)
    if isinstance(windows, WindowRoom):
        slot_bytes -= window_bytes
        reserve["windows"] = windows.taken(window_bytes, options.memory_fraction)
        if options.device != "cpu":
            reserve["windows' row table"] = _table_bytes(step_limits(options), positions)
        slots = slots_of(slot_bytes)
    # Without a limit a sequence may be as long as the pool; a step's prompt must fit all the same.
    least = options.max_total_tokens or options.max_batch_prefill_tokens
    return Capacity(
        ranks,
        memory,
        weights,
        reserve,
        slot_bytes,
        slots,
        min(least, positions),
        rows,
        own.row_bytes if own else 0,
        windows,
        window_bytes if isinstance(windows, WindowRoom) else 0,
    )


def fewest_ranks(
    model: Footprint, options: EngineOptions, *, memory: int, draft: Footprint | None = None
) -> Capacity | None:
    """The capacity with the least number of ranks that divide the model and fit; None: none do."""
    each = (
        capacity(model, options, memory=memory, ranks=n, draft=draft)
        for n in sorted(model.portions)
    )
    return next((found for found in each if found.fits), None)


def logits_each(options: EngineOptions) -> int:
    """How often a step makes logits: also by adapters' heads, if there can be any.

    Terms of factors are added in place, on a CPU once they have been made.
    """
    made_apart = options.lora_vocabulary and options.device == "cpu"
    return 1 + bool(options.max_adapter_heads) + made_apart


def spare_draft_slots(most: int, rows: int) -> int:
    """Slots that a draft model's pool has more than the served one's: for drafts found early.

    `most`: drafts of one row in a step; `rows`: sequences that can be live at once.
    """
    return 1 + most * min(rows, MOST_AHEAD)


def step_limits(options: EngineOptions) -> StepLimits:
    """What executors have room for in a step: a row and a prompt of a liveness probe besides."""
    return StepLimits(
        rows=options.max_batch_size + 1,
        prompt=options.max_batch_prefill_tokens + PROBE_TOKENS,
        drafts=min(MOST_DRAFTS, options.speculate * options.max_batch_size),
    )


def largest_step(
    rows: int,
    prompt: int,
    *,
    hidden: int,
    inner: int,
    vocabulary: int,
    item_bytes: int,
    expanded: int = 0,
    drawing: int = 0,
) -> int:
    """Bytes of a step's tensors: `rows` that decode and `prompt` tokens of prompts.

    Args:
        hidden: width of a token's state.
        inner: width inside a rank's shard of the widest layer.
        vocabulary: entries of a row of logits.
        item_bytes: of an activation.
        expanded: numbers that attention makes of latents, or of int8, at a time.
        drawing: bytes that a sampler takes while it draws, when activations are gone.
    """
    tokens = rows + prompt
    activations = (3 * tokens * hidden + max(3 * tokens * inner, tokens * hidden + expanded)) * (
        item_bytes
    )
    # As the product leaves them, and as float32.
    logits = rows * vocabulary * (item_bytes + ITEM_BYTES["float32"])
    return max(activations, drawing) + logits


def widened(kv_dtype: str, kv_widest: int, positions: int, item_bytes: int) -> int:
    """Activations that a CPU makes of the keys and values of one row, where they are of int8."""
    if kv_dtype != "int8":
        return 0
    return positions * kv_widest * ITEM_BYTES["float32"] // item_bytes


def _table_bytes(limits: StepLimits, positions: int) -> int:
    """Of the slots of all rows' positions, on a GPU."""
    return (limits.rows + 1) * positions * ITEM_BYTES["float32"]


def _reserve(
    model: Footprint, options: EngineOptions, item_bytes: int, ranks: int
) -> dict[str, int]:
    limits = step_limits(options)
    portion, positions = model.portions[ranks], positions_of(model, options)
    if portion.expansion is not None:
        expanded = portion.expansion.numbers(positions, options.device)
    else:
        expanded = widened(options.kv_cache_dtype, portion.kv_widest, positions, item_bytes)
    # What decodes with a state of its own is counted with that.
    step = largest_step(
        1 if model.states else limits.samples,
        limits.prompt,
        hidden=model.hidden_size,
        inner=model.intermediate_size // ranks,
        vocabulary=model.vocab_size * logits_each(options),
        item_bytes=item_bytes,
        expanded=expanded,
        drawing=0 if options.device == "cpu" else limits.rows * model.vocab_size * _CANDIDATE_BYTES,
    )
    adapters = {}
    if options.max_adapters:
        adapters["adapters"] = model.adapter_bytes(
            ranks, options.max_adapters, options.max_adapter_rank, item_bytes
        )
    if options.lora_vocabulary:
        each = model.portions[ranks].vocabulary_numbers * options.max_adapter_rank * item_bytes
        adapters["LoRA on embedding and head"] = options.max_adapters * each
    if options.max_adapter_heads:
        own = model.portions[ranks].copied_numbers * item_bytes
        adapters["adapter embeddings and heads"] = options.max_adapter_heads * own
    if options.device == "cpu":
        return {"processes": _CPU_PROCESSES, "largest step": step, **adapters}
    copies = {}
    if options.host_kv_bytes:
        copies["copies to the host"] = STAGING_PIECES * STAGING_BYTES
    return {
        **adapters,
        **copies,
        "CUDA context": _CUDA_CONTEXT,
        "largest step": step,
        "gaps between tensors": step // GAPS,
        # Captured steps have memory of their own, for which the engine keeps back as much.
        "captured steps": step,
        "sampler": limits.rows * model.vocab_size * _COUNT_BYTES,
        "row table": _table_bytes(limits, positions),
    }
