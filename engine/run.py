"""From options to steps: join the other ranks, load, warm up, and run the loop or follow one."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch

from tokenpod.core.capacity import MOST_DRAFTS, step_limits
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import MTP, EngineOptions, Loading, Ready
from tokenpod.core.task import Task
from tokenpod.engine.adapters.adapter_reading import fused_folder, read_given, space_of
from tokenpod.engine.adapters.adapters import Adapters, OwnAdapters
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.constraints.text import MOST_AHEAD
from tokenpod.engine.drafts.draft import load_draft
from tokenpod.engine.exchange import Face
from tokenpod.engine.images.image_encoder import ImageEncoder
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.shards.join import join_group
from tokenpod.engine.startup.assemble import Assembled, assemble, nothing, with_rows
from tokenpod.engine.startup.compile_ahead import CompileAhead, hash_triton
from tokenpod.engine.startup.device_check import check_attention, check_device, check_step
from tokenpod.engine.startup.memory import let_segments_grow
from tokenpod.engine.startup.offload_room import check_offload_room
from tokenpod.engine.startup.room import no_prefix_cache
from tokenpod.engine.steps.executor import CapturesLater, Executor, Launched, Launcher
from tokenpod.kernels.operations.group import Group
from tokenpod.models.decoders.facts import LoadedModel
from tokenpod.models.eagle import is_eagle
from tokenpod.models.folder import read_config, sees_images
from tokenpod.models.load import load_model
from tokenpod.models.medusa import is_medusa
from tokenpod.models.weights.later import Later
from tokenpod.models.weights.shard import WHOLE, Shard
from tokenpod.scheduler.drafts.drafting import Drafter, Drafting, ModelDrafts
from tokenpod.scheduler.drafts.ngrams import NGrams
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.policies.by_name import ADMISSIONS, batching
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.steps.step_times import Costs

if TYPE_CHECKING:
    from tokenpod.engine.gpu.late_kernels import LateKernels
    from tokenpod.engine.shards.member import Member
    from tokenpod.models.towers.tower import Tower


def run(
    options: EngineOptions, link: Face, member: Member | None, ahead: CompileAhead | None = None
) -> None:
    """Load, say so, and take steps until the link closes (raises LinkClosed) or the group ends.

    `ahead` compiles kernels meanwhile. Raises EngineError or ModelError with one line that says
    what is wrong.
    """
    assembled, ready, limits, tower = load(options, link, member, ahead)
    # What lives now lives for ever: spare the collector the walk. Before anybody knows that we are
    # ready: it stops every thread, also the one that sends a rank's heartbeats.
    gc.collect()
    gc.freeze()
    if member is not None:
        member.come_up(ready.slots)
    link.send(ready)
    store = assembled.adapters
    if member is not None and not member.leads:
        own = OwnAdapters(store, options.adapter_folder, member.placement.rank)
        follow(member, assembled.executor, own, assembled.captures)
    launcher: Launcher = assembled.executor
    captures = assembled.captures
    if member is not None:
        launcher = leading = member.leading(assembled.executor, captures)
        captures = None if captures is None else leading
    scheduler = Scheduler(
        limits,
        admission=ADMISSIONS[options.admission],
        batching=batching(
            options.batching,
            ratio=options.waiting_served_ratio,
            max_waiting_tokens=options.max_waiting_tokens,
        ),
        drafting=drafting(options),
        preemption=PREEMPTIONS[options.preemption](options.host_kv_least_tokens),
        forced_costs=Costs(),
        measured=assembled.measured,
    )
    adapters: Adapters | None = None
    if store is not None:
        adapters = Adapters(
            store,
            scheduler.adapters,
            ready.adapters,
            root=options.adapter_folder,
            most=options.max_loaded_adapters,
            send=link.send,
            followers=member.followers if member else None,
        )
    images = ImageEncoder(
        tower,
        torch.device(options.device),
        options.image_cache_bytes or 0,
        link.send,
        mutual=scheduler.limits.mutual > 0,
    )
    overlap = assembled.overlap
    masks = Masks(Guidance, ready.vocab_size, options.constraints, trials=True)
    masked = MaskedSteps(masks, overlap=overlap)
    late: LateKernels | None = None
    if ready.device_type != "cpu":
        # Not above: Triton comes with it.
        from tokenpod.engine.gpu.late_kernels import LateKernels

        late = LateKernels()
    loop = EngineLoop(
        link,
        scheduler,
        launcher,
        overlap=overlap,
        adapters=adapters,
        images=images,
        masked=masked,
        late=late,
        captures=captures,
    )
    loop.run()


def drafting(options: EngineOptions) -> Callable[[KV], Drafting] | None:
    """Makes what decides who has drafts; None: nobody has."""
    if not options.speculate:
        return None
    drafter: Drafter = NGrams() if options.draft_folder is None else ModelDrafts()
    return lambda kv: Drafting(drafter, options.speculate, kv, Costs())


def _method(options: EngineOptions) -> str:
    """What finds drafts; empty: nothing does."""
    if not options.speculate:
        return ""
    if options.draft_folder is None:
        return "ngram"
    if options.draft_folder == MTP:
        return MTP
    folder = Path(options.draft_folder)
    if is_medusa(folder):
        return "medusa"
    return "eagle3" if is_eagle(folder) else "draft_model"


def follow(
    member: Member, executor: Executor, adapters: OwnAdapters, captures: CapturesLater | None
) -> NoReturn:
    """Take every step that the leader plans, one ahead of the step that is waited for.

    Capture what it captures, at the same place among the steps. Raises RankLost when the group is
    over.
    """
    plans = member.plans(adapters)
    flying: Launched | None = None
    while True:
        with adapters.pace:
            plan = next(plans)  # they end with an error
        launched = None if plan is None else executor.launch(plan)
        if flying is not None:
            with adapters.pace:
                flying.wait()
        flying = launched
        if plan is None:
            assert captures is not None, "the leader captures, and this rank has nothing to"
            captures.capture_next()


def load(
    options: EngineOptions, link: Face, member: Member | None, ahead: CompileAhead | None = None
) -> tuple[Assembled, Ready, Limits, Tower | None]:
    """Join the other ranks, load the model or this rank's shard, make the pool, warm up.

    Raises EngineError or ModelError with one line that says what is wrong.
    """
    device, folder = torch.device(options.device), Path(options.model_folder)
    override = json.loads(options.config_override) if options.config_override else None
    check_device(device)
    check_offload_room(options)
    if device.type == "cuda":
        check_step(step_limits(options))
        hash_triton()
        let_segments_grow()
        torch.cuda.set_device(device.index or 0)
        check_attention(read_config(folder, options.max_total_tokens, override))
    group = _join(member, device) if member else None
    shard = Shard(group.rank, group.world) if group else WHOLE
    torch.set_num_threads(options.threads or _own_cores(group.local_ranks if group else 1))
    began = time.monotonic()
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if done == total or now - reported > 0.1:
            reported = now
            link.send(Loading(done, total))

    dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
    later = Later(device)
    model = load_model(
        folder,
        dtype=dtype,
        device=device,
        progress=progress,
        shard=shard,
        group=group,
        max_total_tokens=options.max_total_tokens,
        quantize=options.quantize,
        quantize_head=options.quantize_head,
        require_manifest=options.require_manifest,
        override=override,
        adapters=space_of(options),
        fuse=fused_folder(options),
        task=options.task,
        drafts=options.speculate,
        deterministic=options.deterministic,
        later=later if device.type == "cuda" else None,
    )
    config, pooling = model.config, model.pooling
    adapters = read_given(model.adapters, options)
    if options.speculate and config.own_state is not None and not config.own_state.takes_back:
        raise EngineError(
            f"speculate is {options.speculate}: {config.architecture} keeps a state for each row,"
            " from which wrong drafts can't be taken back"
        )
    positions = min(options.max_total_tokens or config.max_positions, config.max_positions)
    if pooling is not None:
        _check_pooled(options, model)
        positions = min(positions, pooling.spec.max_tokens or positions)
    if config.encodes:
        # A text is read in one step, which may be as long as it is where the operator has not said.
        if options.short_prompt_steps:
            longest = max(options.max_batch_prefill_tokens, positions)
            options = msgspec.structs.replace(options, max_batch_prefill_tokens=longest)
        positions = min(positions, options.max_batch_prefill_tokens)
    draft = load_draft(options, model, positions, device)
    tower = None
    if options.image_cache_bytes is not None and shard.rank == 0 and sees_images(folder):
        # Not above: transformers takes its time to load.
        from tokenpod.models.towers.tower import largest_image, load_tower

        tower = load_tower(folder, dtype=model.dtype, device=device)
        if device.type == "cuda":
            from tokenpod.engine.images.captured_layers import capture_largest

            capture_largest(tower, largest_image(folder, positions), device)
    loaded = time.monotonic()
    options = with_rows(model, options, positions, device, group)
    assembled = assemble(
        model,
        options,
        positions=positions,
        device=device,
        group=group,
        draft=draft,
        loaded=later.wait,
        compiled=nothing if ahead is None else ahead.wait,
    )
    own, room = config.own_state, assembled.room
    limits = Limits(
        slots=room.slots,
        max_rows=room.rows,
        max_positions=positions,
        prefill_tokens=options.max_batch_prefill_tokens,
        shortest_first=options.shortest_first,
        # Where nothing is generated, no stream waits for a step.
        max_gap=int(1e9 * options.max_gap_seconds)
        if options.max_gap_seconds is not None and pooling is None
        else None,
        short_prompts=options.short_prompt_steps,
        prefix_caching=options.prefix_caching,
        prefix_eviction=options.prefix_eviction,
        sharing=own is None,
        snapshots=room.snapshot_limits,
        scores_prompts=own is None or own.scores_prompts,
        pools=pooling is not None,
        whole_prompts=config.encodes,
        mutual=config.mutual,
        mutual_prompts=config.mutual_prompts,
        own_positions=config.own_positions,
        adapter_slots=options.max_adapters,
        adapters=frozenset(adapter.number for adapter in adapters),
        adapter_heads=options.max_adapter_heads,
        whole_adapters=frozenset(adapter.number for adapter in adapters if adapter.whole),
        offload_slots=assembled.offload_slots,
        windows=room.windows,
        offload_least=options.host_kv_least_tokens,
        # Where steps are captured, only those with drafts have room for several samples of a row.
        # And states of rows have room for the inputs of so many tokens that may be wrong.
        forced=MOST_AHEAD if device.type == "cpu" and own is None else options.speculate,
        # On a CPU no buffer is of a fixed size.
        drafts=MOST_DRAFTS if device.type == "cpu" else step_limits(options).drafts,
    )
    ready = Ready(
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(assembled.kv_dtype).removeprefix("torch."),
        device_type=device.type,
        attention="contiguous" if device.type == "cpu" else "paged",
        requires_padding=own is not None and config.runs_on != "tokenpod",
        window_size=config.sliding_window,
        vocab_size=config.vocab_size,
        max_positions=positions,
        slots=room.slots,
        rows=room.rows,
        speculate=options.speculate,
        draft_method=_method(options),
        parameters=model.parameters_count,
        weight_bytes=model.weight_bytes + (tower.weight_bytes if tower else 0),
        load_seconds=max(loaded, later.ended) - began,
        warmup_seconds=time.monotonic() - loaded,
        slots_from=room.slots_from,
        rope=config.rope_variant,
        unused_tensors=""
        if tower
        else ", ".join(f"{count} of {part}" for part, count in model.unused.items()),
        runs_on=config.runs_on,
        adapters=adapters,
        quantization=model.quantization,
        offload_slots=assembled.offload_slots,
        prefill_tokens=options.max_batch_prefill_tokens,
        task=Task.GENERATE if pooling is None else pooling.spec.task,
        vectors=None if pooling is None else pooling.spec.facts(config.second_text),
        windows_kept=room.windows_kept,
        no_prefix_cache="nothing is kept of a text"
        if config.encodes
        else no_prefix_cache(options, own, room.snapshots),
        images=tower is not None,
    )
    return assembled, ready, limits, tower


def _check_pooled(options: EngineOptions, model: LoadedModel) -> None:
    """Raise EngineError for what goes with models alone that generate."""
    assert model.pooling is not None
    what = f"{model.config.architecture} makes vectors ({model.pooling.spec.task.value})"
    if options.speculate:
        raise EngineError(f"speculate is {options.speculate}: {what}; there is nothing to draft")
    if options.kv_cache_dtype != "auto":
        raise EngineError(f"kv_cache_dtype is {options.kv_cache_dtype}: {what}, and keeps no cache")
    if options.host_kv_bytes:
        raise EngineError(f"host_kv_bytes is {options.host_kv_bytes}: {what}, and keeps no cache")


def _own_cores(ranks: int) -> int:
    """Cores for each of so many ranks of this machine.

    The front end needs a core of its own: whatever else runs on a core of a parallel region holds
    up all of them at its end.
    """
    return max((len(os.sched_getaffinity(0)) - 1) // ranks, 1)


def _join(member: Member, device: torch.device) -> Group:
    place, port = member.placement, member.rendezvous_port
    member.wait_for(f"waiting for the other ranks at {place.rendezvous}:{port} (--master-port)")
    group = join_group(
        place.rank, place.world, place.rendezvous, port, device=device, timeout=place.timeout
    )
    member.wait_for("waiting for all ranks to load")
    return group
