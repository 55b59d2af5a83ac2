"""From options and a model to an executor that is warm and has its KV pool."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from tokenpod.core.capability import eight_bits_problem
from tokenpod.core.capacity import BLOCK, GAPS, largest_step, most_drafts
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.plan import NewRow, PlanRow, StepPlan, plan_of
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import MOST_TOP_TOKENS, SamplingParams
from tokenpod.engine.executor import Executor, Launched
from tokenpod.engine.host_executor import HostExecutor
from tokenpod.engine.host_room import make_host_pool
from tokenpod.engine.kv_scales import (
    EIGHT_BITS,
    EIGHT_BITS_NAME,
    PROMPT_TOKENS,
    measure_scales,
    random_prompt,
)
from tokenpod.engine.memory import (
    PROCESSES_GROW,
    FreeMemory,
    free_memory,
    map_ahead,
)
from tokenpod.engine.room import Room, room_for
from tokenpod.engine.step_executor import no_adapters
from tokenpod.kernels.attention_ops import KVScales
from tokenpod.kernels.group import Group
from tokenpod.kernels.host_pool import HostPool
from tokenpod.kernels.pool import KVPool
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.models.facts import LoadedModel

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
    host_slots: int = 0

    @property
    def slots(self) -> int:
        """KV slots of its pool."""
        return self.room.slots


def assemble(
    model: LoadedModel,
    options: EngineOptions,
    *,
    positions: int,
    device: torch.device,
    group: Group | None = None,
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

    Raises:
        EngineError: the pool that was asked for does not fit, on some rank; the device can't read
            it; or a rank is lost.
    """
    if group is not None:
        group.least(1)  # all have loaded: steps would wait for them without telling why
    if device.type == "cpu":
        return _on_host(model, options, positions, device, group)
    return _on_device(model, options, positions, device, group)


def _on_host(
    model: LoadedModel,
    options: EngineOptions,
    positions: int,
    device: torch.device,
    group: Group | None,
) -> Assembled:
    dtype = _kv_dtype(model, options, device)
    ranks = group.local_ranks if group else 1
    host = make_host_pool(model, options, dtype, device, group)
    free = free_memory(device).shared(ranks)
    if host is not None:
        free = free.less(host.rows.nbytes, "--host-kv-bytes takes")
    if free.limited:
        free = free.less(_serving_takes(model, options, ranks), "a load takes")
    room = room_for(model, options, positions, free, dtype, group)
    pool = make_pool(model, room.slots + PROBE_TOKENS, device)
    if free.limited:
        # Better killed at the start than under load, and nothing grows while serving.
        pool.take_pages()
        if host is not None:
            host.take_pages()
    executor = HostExecutor(
        model,
        pool,
        rows=options.max_batch_size + 1,
        vocab_size=model.config.vocab_size,
        group=group,
        put_adapter=model.adapters.put if model.adapters else no_adapters,
        host=host,
    )
    warm_up(executor, [0] * min(options.max_batch_prefill_tokens, room.slots, positions, 64))
    return Assembled(
        executor,
        room,
        dtype,
        overlap=False,
        adapters=model.adapters,
        host_slots=0 if host is None else host.slots,
    )


def _serving_takes(model: LoadedModel, options: EngineOptions, ranks: int) -> int:
    """Bytes that a pod takes under load and has not taken when its pool is made."""
    step = largest_step(
        options.max_batch_size + 1 + most_drafts(options),
        options.max_batch_prefill_tokens + PROBE_TOKENS,
        hidden=model.config.hidden_size,
        inner=model.config.widest // ranks,
        vocabulary=model.config.vocab_size,
        item_bytes=model.dtype.itemsize,
    )
    return step + PROCESSES_GROW


def _on_device(
    model: LoadedModel,
    options: EngineOptions,
    positions: int,
    device: torch.device,
    group: Group | None,
) -> Assembled:
    """The pool takes what the worst step leaves: that step is run first, on a small pool."""
    # Not on a CPU: these bring Triton with them.
    from tokenpod.engine.device_executor import DeviceExecutor
    from tokenpod.engine.device_sampler import MOST_TOKENS, device_sampler

    dtype = _kv_dtype(model, options, device)
    vocab_size = model.config.vocab_size
    if vocab_size > MOST_TOKENS:
        raise EngineError(
            f"the vocabulary has {vocab_size} tokens; sampling on a GPU handles {MOST_TOKENS}"
        )
    # A row and a prompt more: a liveness probe's.
    rows = options.max_batch_size + 1
    prompt = options.max_batch_prefill_tokens + PROBE_TOKENS
    drafts = most_drafts(options)
    host = make_host_pool(model, options, dtype, device, group)
    pool = make_pool(model, rows + prompt + drafts, device)
    executor = DeviceExecutor(
        model,
        pool,
        device_sampler(
            group,
            rows=rows,
            vocab_size=vocab_size,
            device=device,
            most_edits=max(options.max_logit_edits + len(model.config.eos_token_ids), 1),
        ),
        rows=rows,
        max_positions=positions,
        max_tokens=rows + prompt + drafts,
        device=device,
        adapters=model.adapters is not None,
        put_adapter=model.adapters.put if model.adapters else no_adapters,
        drafts=drafts,
        host=host,
    )
    before = torch.cuda.memory_reserved(device)
    if model.config.own_state is not None:
        rows = 1  # others only decode: their states are counted apart
    adapter = int(model.adapters is not None)
    each = min(options.speculate, positions - 1)
    run_worst_steps(executor, rows, prompt, positions, (drafts, each), adapter)
    step = torch.cuda.memory_reserved(device) - before
    # Captured steps have memory of their own: less than the worst step's, which torch keeps.
    left = free_memory(device)
    free = FreeMemory(left.bytes - step - step // GAPS, f"{left.source} less the largest step")
    room = room_for(model, options, positions, free, dtype, group)
    slots = room.slots
    scales = None
    if dtype == EIGHT_BITS:
        scales = model.kv_scales or _measured_scales(model, executor, pool, min(prompt, positions))
    pool = make_pool(model, slots + PROBE_TOKENS, device, scales)  # the small one goes
    executor.use(pool)
    if model.captures:
        executor.capture()
    # For capturing, torch gave back all that it kept: now it maps that again, and some more.
    rows = max(min(rows, slots // 2), 1)
    drafts = min(drafts, slots - rows - prompt) if slots > rows + prompt else 0
    prompt = max(min(prompt, slots - rows), 1)
    run_worst_steps(executor, rows, prompt, positions, (drafts, each), adapter)
    map_ahead(device, step // GAPS)
    warm_up(executor, [0] * min(prompt, slots, positions, 64))
    if host is not None:
        warm_copies(executor, pool, host)
    return Assembled(
        executor,
        room,
        dtype,
        overlap=True,
        adapters=model.adapters,
        host_slots=0 if host is None else host.slots,
    )


def run_worst_steps(
    executor: Executor,
    rows: int,
    prompt: int,
    positions: int,
    drafts: tuple[int, int] = (0, 0),
    adapter: int = 0,
) -> None:
    """Two of them under way at a time, as in serving.

    The largest first, then smaller ones: the allocator learns to cut up what it has. `adapter`: the
    slot of all rows' adapter; 0: they have none.
    """
    under_way: deque[Launched] = deque()
    for tokens in (prompt, prompt, prompt * 3 // 4, prompt // 2, prompt // 4, prompt // 8):
        executor.release(range(rows))
        scattered = tokens == prompt // 2
        plan = worst_step(
            rows, max(tokens, 1), positions, scattered=scattered, drafts=drafts, adapter=adapter
        )
        under_way.append(executor.launch(plan))
        if len(under_way) > 1:
            under_way.popleft().wait()
    under_way.pop().wait()
    executor.release(range(rows))


def _measured_scales(
    model: LoadedModel, executor: Executor, pool: KVPool, most_tokens: int
) -> KVScales:
    """By a random prompt of so many tokens at most; the executor's pool is in the model's type."""
    prompt = random_prompt(min(most_tokens, PROMPT_TOKENS), model.config.vocab_size)
    warm_up(executor, prompt)
    return measure_scales(pool, len(prompt))


def _kv_dtype(model: LoadedModel, options: EngineOptions, device: torch.device) -> torch.dtype:
    """Of keys and values. Raises EngineError if the device can't read them."""
    if options.kv_cache_dtype != EIGHT_BITS_NAME:
        return model.dtype
    gpu = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = eight_bits_problem(gpu)
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
    return EIGHT_BITS


def make_pool(
    model: LoadedModel, slots: int, device: torch.device, scales: KVScales | None = None
) -> KVPool:
    """A pool for `model`'s keys and values: in its dtype, or of 8 bits with `scales`."""
    config = model.config
    return model.pool_class(
        slots=slots,
        layouts=config.kv_layouts,
        dtype=model.dtype if scales is None else EIGHT_BITS,
        device=device,
        scales=scales,
    )


def warm_copies(executor: Executor, pool: KVPool, host: HostPool) -> None:
    """Copy a few slots to the host's memory and back."""
    n = min(host.slots, pool.slots, 2 * BLOCK)
    there = range(pool.sink + 1, pool.sink + 1 + n)
    for number, ends in enumerate(((range(n), there), (there, range(n))), 1):
        row = PlanRow(0, 0, [pool.sink], [0], new=_new_row([0]))
        plan = plan_of(number, [row], copies=[*zip(*ends, strict=True)], awaited=[0])
        executor.launch(plan).wait()
        executor.release([0])


def warm_up(executor: Executor, tokens: list[int]) -> None:
    """Run a prompt and two decode steps, so that no first request pays for first calls.

    The keys and values of as many tokens as `tokens` lie in the first slots afterwards.
    """
    slots = range(len(tokens))
    n = max(len(tokens) - 2, 1)
    prompt = PlanRow(0, 0, slots[:n], tokens[:n], new=_new_row(tokens))
    executor.launch(plan_of(0, [prompt])).wait()
    for at in range(n, len(tokens)):
        decode = PlanRow(0, at, slots[at : at + 1], output=at - n + 1)
        executor.launch(plan_of(0, [decode])).wait()
    executor.release([0])


def worst_step(
    rows: int,
    prompt: int,
    positions: int,
    *,
    scattered: bool,
    drafts: tuple[int, int] = (0, 0),
    adapter: int = 0,
) -> StepPlan:
    """The step that takes most memory: all rows sample, and prompts of `prompt` tokens are scored.

    Args:
        rows: sequences that can be live at once.
        prompt: most prompt tokens of a step.
        positions: longest sequence, in tokens.
        scattered: no two slots of a row are adjacent.
        adapter: the slot of all rows' adapter; 0: they have none.
        drafts: how many there are of all rows, and of one row at most.
    """
    lengths = [1] * rows
    guessed = [0] * rows
    left, each = drafts
    for row in range(rows if each else 0):
        guessed[row] = min(each, left)
        lengths[row] += guessed[row]
        left -= guessed[row]
    for row in range(rows - 1, -1, -1):
        if guessed[row]:
            break
        lengths[row] = max(min(prompt, positions - 1), 1)
        prompt -= lengths[row]
        if prompt <= 0:
            break
    slots = range(sum(lengths))
    if scattered:
        slots = slots[::-1]
    steps, at = [], 0
    for row, length in enumerate(lengths):
        tokens, samples = [0] * length, 1 + guessed[row]
        following = tokens if length > samples else []
        own, new = slots[at : at + length], _new_row(tokens)
        steps.append(
            PlanRow(row, 0, own, tokens, samples, following=following, new=new, adapter=adapter)
        )
        at += length
    return plan_of(0, sorted(steps, key=lambda row: len(row.slots) > 1))


def _new_row(prompt: list[int]) -> NewRow:
    """A row that asks its sampler for everything."""
    sampling = SamplingParams(
        do_sample=True, temperature=0.9, top_k=10, top_p=0.9, seed=1, top_of_processed=True
    )
    stopping = StoppingParams(max_new_tokens=1)
    asked = Request(
        [0],
        prompt,
        sampling,
        stopping,
        logprobs=True,
        top_n_tokens=2,
        prompt_logprobs=True,
        prompt_top_n_tokens=MOST_TOP_TOKENS,
        prompt_ranks=True,
    )
    return NewRow(asked, stream=0)
