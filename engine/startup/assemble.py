"""From options and a model to an executor that is warm and has its KV pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from tokenpod.core.capability import eight_bits_problem
from tokenpod.core.capacity import (
    GAPS,
    largest_step,
    logits_each,
    spare_draft_slots,
    step_limits,
    widened,
)
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.model_size import LONGEST_EXPANDED
from tokenpod.core.windows import WindowRoom
from tokenpod.engine.drafts.draft import DraftModel, draft_of
from tokenpod.engine.startup.kept import Kept, Measured, kept_of
from tokenpod.engine.startup.kv_scales import (
    EIGHT_BITS,
    POOL_TYPES,
    PROMPT_TOKENS,
    measure_scales,
    random_prompt,
)
from tokenpod.engine.startup.memory import (
    PROCESSES_GROW,
    FreeMemory,
    free_memory,
    in_one_piece,
    map_ahead,
    pin_ahead,
)
from tokenpod.engine.startup.offload_room import make_offload_pool
from tokenpod.engine.startup.room import Room, room_for, rows_for
from tokenpod.engine.steps.drafter import Drafter
from tokenpod.engine.steps.executor import CapturesLater, Executor
from tokenpod.engine.steps.first_steps import (
    run_worst_steps,
    timed_steps,
    warm_copies,
    warm_up,
)
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import KVScales
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.products.library import load_kernels
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.models.decoders.facts import LoadedModel
from tokenpod.scheduler.steps.machine_times import StepSize

if TYPE_CHECKING:
    from tokenpod.engine.gpu.device_executor import DeviceExecutor
    from tokenpod.kernels.cache.offload_pool import OffloadPool

__all__ = ["Assembled", "EngineError", "assemble"]


@dataclass(frozen=True, slots=True)
class Assembled:
    """An executor ready for its first step."""

    executor: Executor
    #: Without what is kept for liveness probes.
    room: Room
    #: Of the numbers in its pool.
    kv_dtype: torch.dtype
    #: Whether a step can be launched before the one before has been waited for.
    overlap: bool
    #: None: the model takes none.
    adapters: AdapterStore | None = None
    #: Tokens whose keys and values the host's memory holds.
    offload_slots: int = 0
    #: Steps that were timed, and their seconds.
    measured: Sequence[tuple[StepSize, float]] = ()
    #: What is captured once the engine has nothing else to do; None: nothing is.
    captures: CapturesLater | None = None

    @property
    def slots(self) -> int:
        """KV slots of its pool."""
        return self.room.slots


def nothing() -> None:
    """All is there."""


def with_rows(
    model: LoadedModel,
    options: EngineOptions,
    positions: int,
    device: torch.device,
    group: Group | None,
) -> EngineOptions:
    """The options with as many rows as a GPU's memory holds well, if nobody has said how many.

    Arguments and errors are those of `assemble`, which is called next.
    """
    if not options.fewer_rows:
        return options
    dtype = kv_dtype(model, options, device)
    rows = rows_for(model, options, positions, free_memory(device), dtype, group)
    return msgspec.structs.replace(options, max_batch_size=rows)


def assemble(
    model: LoadedModel,
    options: EngineOptions,
    *,
    positions: int,
    device: torch.device,
    group: Group | None = None,
    draft: DraftModel | None = None,
    loaded: Callable[[], object] = nothing,
    compiled: Callable[[], object] = nothing,
) -> Assembled:
    """Size and make the pool, warm everything up.

    All ranks of a group call this, with the same options, and get pools of the same size: what fits
    on the rank that has least memory. From then on their executors are given the same plans in the
    same order; only the leader's results say more than tokens.

    Args:
        model: on `device`.
        options: the operator's.
        positions: longest sequence, in tokens.
        device: a CPU or a GPU.
        group: the ranks that share the model, if it is divided.
        draft: finds drafts, whole on each of them; None: whatever drafts there are, plans have.
        loaded: waits for weights that are still being read, zeros until then: called before any
            number that is computed matters.
        compiled: waits for kernels that are still being compiled: called before the first step.

    Raises:
        EngineError: the pool that was asked for does not fit, on some rank; the device can't read
            it; or a rank is lost.
    """

    def meet() -> None:
        if group is not None:
            group.least(1)  # steps would wait for all without telling why

    if device.type == "cpu":
        meet()
        loaded()
        return _on_cpu(model, options, positions, device, group, draft)

    def ready() -> None:
        loaded()
        meet()

    kv_dtype(model, options, device)  # what the device can't read is refused before all else
    kept = kept_of(options, device)
    known = kept.read()
    if known is None:
        loaded()  # which products load kernels shows by time, and who reads takes some of it
    library = load_kernels({} if known is None else known.library)
    compiled()
    meet()
    given = model, options, positions, device, group, draft, ready, kept, library
    return kept.used(partial(_on_device, *given), group)


def _on_cpu(
    model: LoadedModel,
    options: EngineOptions,
    positions: int,
    device: torch.device,
    group: Group | None,
    draft: DraftModel | None,
) -> Assembled:
    # Not on a GPU: it brings numba with it, which compiles a CPU's loops.
    from tokenpod.engine.cpu.cpu_executor import CpuExecutor

    dtype = kv_dtype(model, options, device)
    ranks = group.local_ranks if group else 1
    offload = make_offload_pool(model, options, dtype, device, group, draft)
    free = free_memory(device).shared(ranks)
    if offload is not None:
        free = free.less(offload.rows.nbytes, "--host-kv-bytes takes")
    if free.limited:
        free = free.less(_serving_takes(model, options, positions, ranks), "a load takes")
    room = room_for(model, options, positions, free, dtype, group, draft)
    pool = make_pool(model, room.slots + PROBE_TOKENS, device, dtype, windows=room.windows)
    pool.reserve(room.states)
    drafts = _draft(draft, model, options, room.slots + PROBE_TOKENS, device)
    if free.limited:
        # Better killed at the start than under load, and nothing grows while serving.
        pool.take_pages()
        if drafts is not None:
            drafts.pool.take_pages()
        if offload is not None:
            offload.take_pages()
    executor = CpuExecutor(
        model,
        pool,
        rows=step_limits(options).rows,
        vocab_size=model.config.vocab_size,
        group=group,
        adapters=model.adapters,
        draft=drafts,
        offload=offload,
        own_positions=model.config.own_positions,
        fills=model.config.encodes,
    )
    pools = model.pooling is not None
    first = [0] * min(options.max_batch_prefill_tokens, room.slots, positions, 64)
    warm_up(executor, first, pools=pools)
    if pools:
        # A text of one token attends by a loop that others don't call.
        warm_up(executor, first[:1], pools=True)
    return Assembled(
        executor,
        room,
        dtype,
        overlap=False,
        adapters=model.adapters,
        offload_slots=0 if offload is None else offload.slots,
    )


def _serving_takes(model: LoadedModel, options: EngineOptions, positions: int, ranks: int) -> int:
    """Bytes that a pod takes under load and has not taken when its pool is made."""
    from tokenpod.engine.cpu.noted_steps import MOST_BYTES

    config, item_bytes = model.config, model.dtype.itemsize
    if config.expansion is not None:
        expanded = config.expansion.numbers(positions, options.device)
    else:
        widest = max((layout.numbers for layout in config.kv_layouts), default=0)
        expanded = widened(options.kv_cache_dtype, widest, positions, item_bytes)
    limits = step_limits(options)
    step = largest_step(
        limits.samples,
        limits.prompt,
        hidden=config.hidden_size,
        inner=config.widest // ranks,
        vocabulary=config.vocab_size * logits_each(options),
        item_bytes=item_bytes,
        expanded=expanded,
    )
    return step + PROCESSES_GROW + MOST_BYTES


def _on_device(
    model: LoadedModel,
    options: EngineOptions,
    positions: int,
    device: torch.device,
    group: Group | None,
    draft: DraftModel | None,
    loaded: Callable[[], object],
    kept: Kept,
    library: dict[str, list[int]],
    measured: Measured | None,
) -> Assembled:
    """The pool takes what the worst step leaves: that step is run first, on a small pool.

    Unless that was `measured` by a start before, which `kept` it.
    """
    dtype = kv_dtype(model, options, device)
    limits = step_limits(options)
    rows, prompt, drafts = limits.rows, limits.prompt, limits.drafts
    pools = model.pooling is not None
    adapted = model.adapters is not None and model.adapters.slots > 0
    offload = make_offload_pool(model, options, dtype, device, group, draft)
    pool = make_pool(model, limits.tokens, device)
    spare = spare_draft_slots(options.speculate, rows)
    drafter = _draft(draft, model, options, pool.slots + spare, device)
    executor = device_executor(
        model, options, pool, positions, device, group=group, draft=drafter, offload=offload
    )
    before, free_before = torch.cuda.memory_reserved(device), free_memory(device)
    if model.config.own_state is not None:
        rows = 1  # others only decode: their states are counted apart
    adapter = int(adapted)
    # Of a longer one parts of that length are merged.
    context = min(positions, LONGEST_EXPANDED + prompt) if model.config.expansion else 0
    each = min(options.speculate, positions - 1)
    run_largest = partial(
        run_worst_steps,
        executor,
        unknown=draft is not None,
        pools=pools,
        mutual=model.config.mutual > 0,
    )
    if measured is None:
        run_largest(rows, prompt, positions, (drafts, each), adapter, context, smaller=False)
        step = torch.cuda.memory_reserved(device) - before
        taken = max(free_before.bytes - free_memory(device).bytes, step)
    else:
        step, taken = measured.step, measured.taken
    # Captured steps have memory of their own: less than the worst step's, which torch keeps.
    left = free_before.bytes - taken - step - step // GAPS
    free = FreeMemory(left, f"{free_before.source} less the largest step")
    room = room_for(model, options, positions, free, dtype, group, draft)
    slots = room.slots
    scales = None
    if dtype == EIGHT_BITS:
        loaded()
        scales = model.kv_scales or _measured_scales(model, executor, pool, min(prompt, positions))
    # The small one goes.
    pool = make_pool(model, slots + PROBE_TOKENS, device, dtype, scales, room.windows)
    executor.use(pool, make_pool(draft, pool.slots + spare, device) if draft else None)
    pool.reserve(room.states)
    some = model.captures > 0 and not options.speculate  # drafts have graphs of their own
    if model.captures:
        executor.capture(some=some)
    # For capturing, torch gave back all that it kept: now it maps that again, and some more. Memory
    # of one layer is the next one's.
    rows = max(min(rows, slots // 2), 1)
    drafts = min(drafts, slots - rows - prompt) if slots > rows + prompt else 0
    prompt = max(min(prompt, slots - rows), 1)
    with executor.first_layers():
        run_largest(rows, prompt, positions, (drafts, each), adapter, context)
    map_ahead(device, step // GAPS)
    pin_ahead()
    loaded()
    warm_up(executor, [0] * min(prompt, slots, positions, 64), pools=pools)
    if offload is not None:
        warm_copies(executor, pool.sink, offload.slots)
    times = [] if measured is None else measured.times
    if measured is None and options.max_gap_seconds is not None and not pools:
        times = timed_steps(
            executor,
            rows=room.rows,
            prompt=options.max_batch_prefill_tokens,
            positions=positions,
            slots=slots,
            stateless=model.config.own_state is None,
        )
    if measured is None:
        kept.write(Measured(step, taken, times, library))
    return Assembled(
        executor,
        room,
        dtype,
        overlap=True,
        adapters=model.adapters,
        offload_slots=0 if offload is None else offload.slots,
        measured=times,
        captures=executor if some else None,
    )


def device_executor(
    model: LoadedModel,
    options: EngineOptions,
    pool: KVPool,
    positions: int,
    device: torch.device,
    *,
    group: Group | None = None,
    draft: Drafter | None = None,
    offload: OffloadPool | None = None,
) -> DeviceExecutor:
    """An executor with room for the steps that `options` allow, which has captured none yet.

    See `assemble` for the arguments. Raises EngineError for a vocabulary that is too large.
    """
    # Not on a CPU: these bring Triton with them.
    from tokenpod.engine.gpu.device_executor import DeviceExecutor
    from tokenpod.engine.gpu.device_sampler import MOST_TOKENS, device_sampler

    limits, vocab_size = step_limits(options), model.config.vocab_size
    if vocab_size > MOST_TOKENS:
        raise EngineError(
            f"the vocabulary has {vocab_size} tokens; sampling on a GPU handles {MOST_TOKENS}"
        )
    return DeviceExecutor(
        model,
        pool,
        device_sampler(
            group,
            rows=limits.rows,
            vocab_size=vocab_size,
            device=device,
            most_edits=max(options.max_logit_edits + len(model.config.eos_token_ids), 1),
        ),
        rows=limits.rows,
        max_positions=positions,
        max_tokens=limits.tokens,
        device=device,
        adapted=model.adapters is not None and model.adapters.slots > 0,
        adapters=model.adapters,
        drafts=limits.drafts,
        draft=draft,
        offload=offload,
        windowed=offload is None and any(model.config.kv_windows),
        flat=model.config.own_state is None,
        own_positions=model.config.own_positions,
    )


def _measured_scales(
    model: LoadedModel, executor: Executor, pool: KVPool, most_tokens: int
) -> list[KVScales]:
    """By a random prompt of so many tokens at most; the executor's pool is in the model's type."""
    prompt = random_prompt(min(most_tokens, PROMPT_TOKENS), model.config.vocab_size)
    warm_up(executor, prompt)
    return measure_scales(pool, len(prompt))


def kv_dtype(model: LoadedModel, options: EngineOptions, device: torch.device) -> torch.dtype:
    """Of keys and values in the pool. Raises EngineError if the device can't read them."""
    dtype = POOL_TYPES.get(options.kv_cache_dtype)
    if dtype is None:
        return model.dtype
    gpu = None
    if device.type != "cpu":
        from tokenpod.kernels.gpu.launch import capability

        gpu = capability(device)
    problem = eight_bits_problem(options.kv_cache_dtype, gpu)
    if problem is not None:
        raise EngineError(problem)
    config, asked = model.config, f"kv_cache_dtype is {options.kv_cache_dtype}"
    if any(layout.shared for layout in config.kv_layouts):
        raise EngineError(
            f"{asked}: {config.architecture} has latent rows, which are held as they are"
        )
    if config.runs_on != "tokenpod":
        raise EngineError(
            f"{asked}: {config.architecture} is computed by {config.runs_on}; its keys and values "
            "are held as they are"
        )
    return dtype


def _draft(
    draft: DraftModel | None,
    model: LoadedModel,
    options: EngineOptions,
    slots: int,
    device: torch.device,
) -> Drafter | None:
    """A draft model with a pool of so many slots, if there is one."""
    if draft is None:
        return None
    pool, rows = make_pool(draft, slots, device), options.max_batch_size + 1
    return draft_of(draft, model, pool, options.speculate, rows)


def make_pool(
    model: DraftModel,
    slots: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    scales: Sequence[KVScales] | None = None,
    windows: WindowRoom | None = None,
) -> KVPool:
    """A pool for `model`'s keys and values: in its dtype, or in `dtype`; `scales` as a pool has.

    `windows`: the slots of layers with a window, where these are apart.
    """
    config = model.config
    with in_one_piece(device):
        return model.pool_class(
            slots=slots,
            layouts=config.kv_layouts,
            dtype=dtype or model.dtype,
            device=device,
            scales=scales,
            window_slots=windows.slots if windows else 0,
            windowed=[window is not None for window in config.kv_windows],
        )
