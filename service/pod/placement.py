"""The options of a pod's engines, with their places in the group."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenpod.core.constraints import ConstraintLimits
from tokenpod.core.messages import EngineOptions
from tokenpod.core.placement import Placement, ShardTls
from tokenpod.service.config.resolved import host_of
from tokenpod.service.config.sources import ServerSettings


def lone_options(
    settings: ServerSettings,
    model_folder: Path,
    adapters: Sequence[tuple[str, str]] = (),
    draft: Path | None = None,
) -> EngineOptions:
    """The options of an engine without a group, for the model in `model_folder`.

    `adapters`: names and folders of those that are loaded with it; `draft`: where its draft model
    lies, if it has one.
    """
    return EngineOptions(
        model_folder=str(model_folder),
        dtype=settings.resolved_dtype,
        device=settings.resolved_device,
        threads=settings.threads,
        max_batch_size=settings.resolved_batch_size,
        max_batch_prefill_tokens=settings.resolved_prefill_tokens,
        short_prompt_steps=settings.short_prompt_steps,
        fewer_rows=settings.fewer_rows,
        max_gap_seconds=settings.max_gap_seconds,
        shortest_first=settings.queue_order == "shortest",
        max_total_tokens=settings.max_total_tokens,
        max_batch_total_tokens=settings.max_batch_total_tokens,
        memory_fraction=settings.memory_fraction,
        kv_cache_dtype=settings.kv_cache_dtype,
        quantize=None if settings.quantize == "none" else settings.quantize,
        quantize_head=settings.quantize_head,
        config_override=settings.config_override,
        max_logit_edits=3 * settings.max_logit_bias,
        constraints=ConstraintLimits(
            workers=settings.constraint_workers,
            compile_seconds=settings.constraint_compile_timeout,
            mask_seconds=settings.constraint_mask_timeout,
            cache_bytes=settings.constraint_cache_bytes,
        ),
        prefix_caching=settings.prefix_caching,
        prefix_eviction=settings.prefix_eviction,
        require_manifest=settings.require_manifest,
        max_adapters=settings.resolved_adapters,
        max_adapter_rank=settings.max_adapter_rank,
        max_adapter_heads=min(settings.max_adapter_heads, settings.resolved_adapters),
        lora_vocabulary=settings.lora_vocabulary and not settings.lora_fuse,
        max_loaded_adapters=settings.max_loaded_adapters,
        adapter_folder=str(settings.adapter_folder or ""),
        adapters=list(adapters),
        lora_fuse=settings.lora_fuse,
        admission=settings.admission,
        batching=settings.batching,
        waiting_served_ratio=settings.resolved_waiting_served_ratio,
        max_waiting_tokens=settings.resolved_max_waiting_tokens,
        speculate=settings.speculate,
        deterministic=settings.deterministic,
        draft_folder=None if draft is None else str(draft),
        host_kv_bytes=settings.host_kv_bytes,
        host_kv_least_tokens=settings.host_kv_least_tokens,
        preemption=settings.preemption,
        task=settings.task,
        image_cache_bytes=settings.image_cache_bytes if settings.max_images else None,
    )


def engine_options(
    settings: ServerSettings,
    model_folder: Path,
    address: str,
    adapters: Sequence[tuple[str, str]] = (),
    draft: Path | None = None,
) -> list[EngineOptions]:
    """The options of each engine of this pod, which clients reach at `address`: one per rank."""
    alone = lone_options(settings, model_folder, adapters, draft)
    return [
        msgspec.structs.replace(
            alone,
            placement=place,
            device=f"cuda:{place.local_rank}" if alone.device == "cuda" else alone.device,
        )
        for place in placements(settings, address)
    ] or [alone]


def placements(settings: ServerSettings, address: str) -> list[Placement]:
    """This pod's ranks, the first one first; none if the engine is alone.

    Each start of a group calls it again: within one pod only its own processes can join, because
    the address and the secret are new. Clients reach this pod at `address`.
    """
    if settings.world == 1:
        return []
    alone = settings.num_nodes == 1
    plans, secret = f"unix-abstract:tokenpod-{secrets.token_hex(8)}", secrets.token_hex(16)
    rendezvous = settings.master_addr or ""
    found_at = "" if alone else f"{host_of(rendezvous)}:{settings.shard_port}"
    made = []
    for local_rank in range(settings.num_shard):
        rank = settings.first_rank + local_rank
        if not alone:
            bound = f"{host_of(settings.hostname)}:{settings.shard_port}"
            plans, secret = found_at if rank else bound, ""
        made.append(
            Placement(
                rank=rank,
                world=settings.world,
                local_rank=local_rank,
                plans=plans,
                rendezvous="127.0.0.1" if alone else rendezvous,
                rendezvous_port=0 if alone else settings.master_port,
                leader_address=f"{host_of(rendezvous)}:{address.rpartition(':')[2]}",
                secret=secret,
                found_at=found_at,
                tls=None if alone else _tls(settings),
                timeout=settings.start_timeout,
            )
        )
    return made


def _tls(settings: ServerSettings) -> ShardTls | None:
    cert, key, ca = settings.shard_tls_cert, settings.shard_tls_key, settings.shard_tls_ca
    if cert is None or key is None or ca is None:
        return None
    return ShardTls(str(cert), str(key), str(ca))
