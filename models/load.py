"""From a folder with config.json and safetensors to a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenpod.core.adapters import scale_bytes
from tokenpod.kernels.backends.registry import deterministic_operations, operations_for
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.parallel import parallel
from tokenpod.models.adapters.store import Space, store_of
from tokenpod.models.adapters.targets import (
    copied_numbers,
    scale_numbers,
    slot_numbers,
    targets_of,
    vocabulary_numbers,
)
from tokenpod.models.adapters.virtual import VirtualBase
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.verify import verified
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.decoders.facts import LoadedModel, ModelFacts
from tokenpod.models.folder import describe, is_native, read_layout, tier_of, unsupported
from tokenpod.models.formats import as_stored, bytes_needed
from tokenpod.models.layers.attention import Attention
from tokenpod.models.layers.reading import Progress, read_weights
from tokenpod.models.pooling.head import pooling_head
from tokenpod.models.specs.kv_scales import read_scales
from tokenpod.models.specs.layer_spec import Experts
from tokenpod.models.specs.layout import Layout
from tokenpod.models.weights.later import Later
from tokenpod.models.weights.memory import available_bytes, freed_at_once
from tokenpod.models.weights.shard import WHOLE, Shard

if TYPE_CHECKING:
    from tokenpod.models.tier.choose import Loader


@freed_at_once()
def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: Progress,
    shard: Shard = WHOLE,
    group: Group | None = None,
    max_total_tokens: int | None = None,
    quantize: str | None = None,
    quantize_head: bool = False,
    require_manifest: bool = False,
    override: Mapping[str, Any] | None = None,
    adapters: Space | None = None,
    fuse: Path | None = None,
    task: str = "auto",
    drafts: int = 0,
    deterministic: bool = False,
    later: Later | None = None,
) -> LoadedModel:
    """Load a checkpoint, or one rank's shard of it.

    Args:
        folder: with config.json and safetensors.
        dtype: None keeps the checkpoint's.
        device: where the weights go.
        progress: called with bytes read so far and in all, first with 0.
        shard: whose part to read.
        group: the ranks of that shard; None if it is all of the model.
        max_total_tokens: the longest sequence that will be served; None: what the model can.
        quantize: the format that products' weights are made into; None: `dtype`.
        quantize_head: make the head's so too.
        require_manifest: refuse a folder without a manifest; one that is there is always checked.
        override: fields that replace those of config.json.
        adapters: what is taken for adapters; None: there are none.
        fuse: folder of a LoRA adapter that is fused into the weights; None: there is none.
        task: what is done with it, a value of `Task`; "auto": what its files show.
        drafts: so many of a row may turn out to be wrong.
        deterministic: what a token yields does not depend on the step that it is in.
        later: may go on reading when the model is there; None: all is read by then.

    Raises:
        ModelError: with one line for whatever is wrong with the folder, if ranks can't share the
            model, and if the weights don't fit into memory.
    """
    assert shard == (Shard(group.rank, group.world) if group else WHOLE)
    local = group.local_ranks if group else 1
    share = (shard.rank % local, local)
    if not is_native(folder):
        tier = tier_of(folder, max_total_tokens, override)
        _check_length(tier.spec, max_total_tokens)
        check_alone(tier.spec, shard, quantize, adapters, fuse)
        if deterministic:
            raise ModelError(_not_deterministic("is computed by transformers", tier.spec))
        with (
            Checkpoint(folder) as checkpoint,
            verified(folder, checkpoint.files, required=require_manifest, share=share),
        ):
            return _load_tier(tier, checkpoint, dtype=dtype, device=device, progress=progress)
    read = describe(folder, max_total_tokens, override)
    family, spec = read.family, read.spec
    _check_length(spec, max_total_tokens)
    spec.check(shard.world)
    if adapters is not None or fuse is not None or drafts:
        later = None  # these look at weights
    with ExitStack() as files:
        checkpoint = files.enter_context(_opened(folder, fuse))
        files.enter_context(
            verified(folder, checkpoint.files, required=require_manifest, share=share)
        )
        layout = read_layout(
            folder,
            checkpoint,
            max_total_tokens,
            quantize,
            quantize_head=quantize_head,
            override=override,
            task=task,
        )
        spec, weights = layout.spec, layout.weights
        dtype = dtype or spec.dtype or torch.float32
        ops = deterministic_operations() if deterministic else operations_for(device)
        reader = as_stored(spec, layout.reader, checkpoint, dtype, ops)
        if deterministic:
            check_deterministic(layout, dtype, device, shard, adapters)
        needed = bytes_needed(weights, shard, dtype, reader)
        if adapters is not None:
            numbers = adapters.slots * slot_numbers(weights, shard, adapters.rank)
            numbers += adapters.heads * copied_numbers(weights, shard)
            if adapters.vocabulary:
                numbers += adapters.slots * vocabulary_numbers(weights, shard, adapters.rank)
            needed += numbers * dtype.itemsize
            needed += scale_bytes(*scale_numbers(weights, shard), adapters.slots)
        _check_memory(needed, dtype, device, local)
        try:
            tensors = read_weights(
                checkpoint,
                weights,
                dtype=dtype,
                device=device,
                progress=progress,
                shard=shard,
                reader=reader,
                later=later,
            )
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelError(f"{folder}: not enough memory for the weights ({error})") from None
        scales = read_scales(checkpoint, layout.scales, spec.kv_layouts, shard, device)
        pooling = None
        if layout.pooling is not None:
            pooling = pooling_head(layout.pooling, folder, checkpoint, device)
        if later is not None:
            later.begin(files.pop_all())
    store = None
    if adapters is not None:
        positions = min(max_total_tokens or spec.max_positions, spec.max_positions)
        virtual = VirtualBase(spec, shard, dtype, positions)
        targets = targets_of(family, spec)
        store = store_of(targets, weights, tensors, adapters, virtual, ops, group, folder)
    return Decoder(
        replace(spec, drafts=drafts).on_rank(shard),
        tensors,
        parallel(ops, group) if group else ops,
        parameters=layout.parameters,
        kv_scales=scales,
        unused=layout.unused,
        adapters=store,
        quantization=layout.reader.name if layout.reader else "",
        pooling=pooling,
        dtype=dtype,
    )


def _opened(folder: Path, fuse: Path | None) -> Checkpoint:
    if fuse is None:
        return Checkpoint(folder)
    # Not above: the format's own library comes with it.
    from tokenpod.models.adapters.fused import FusedCheckpoint

    return FusedCheckpoint(folder, fuse)


def check_alone(
    facts: ModelFacts,
    shard: Shard,
    quantize: str | None,
    adapters: Space | None = None,
    fuse: Path | None = None,
) -> None:
    """Raise ModelError for what only families of ours can do."""
    name = facts.architecture
    if shard.world > 1:
        raise ModelError(
            f"{name} is computed by transformers: it runs on 1 rank, and there are {shard.world}"
        )
    if quantize is not None:
        raise ModelError(
            f"quantize is {quantize}: {name} is computed by transformers, with weights as they are"
        )
    if adapters is not None or fuse is not None:
        raise ModelError(f"adapters: {name} is computed by transformers, and takes none")


def check_deterministic(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    adapters: Space | None,
) -> None:
    """Raise ModelError for a model of which not all kernels are `deterministic`."""
    spec = layout.spec
    problems = {
        f"runs on a device of type {device.type}, and not on a GPU": device.type != "cuda",
        f"is divided between {shard.world} ranks": shard.world > 1,
        "has quantised weights": layout.reader is not None,
        "has mixtures of experts": any(isinstance(layer.mlp, Experts) for layer in spec.layers),
        "has layers that are not plain attention": any(
            type(mixer) is not Attention for layer in spec.layers for mixer in layer.mixers
        ),
        "makes vectors": layout.pooling is not None,
        f"is computed in {str(dtype).removeprefix('torch.')}": dtype.itemsize > 2,
        "takes adapters": adapters is not None and adapters.slots > 0,
    }
    for problem, found in problems.items():
        if found:
            raise ModelError(_not_deterministic(problem, spec))


def _not_deterministic(problem: str, facts: ModelFacts) -> str:
    return f"deterministic: {facts.architecture} {problem}; results would depend on the step"


def _load_tier(
    tier: Loader,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: Progress,
) -> LoadedModel:
    """The model of another family. See `load_model`."""
    from tokenpod.models.tier.errors import NotServed

    dtype = dtype or tier.spec.dtype or torch.float32
    _check_memory(tier.numbers * dtype.itemsize, dtype, device, 1)
    try:
        ops = operations_for(device)
        return tier.load(checkpoint, dtype=dtype, device=device, ops=ops, progress=progress)
    except NotServed as reason:
        raise unsupported(tier.fields, reason) from None
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"not enough memory for the weights ({error})") from None


def _check_length(spec: ModelFacts, max_total_tokens: int | None) -> None:
    """Raise ModelError unless the model's context has so many tokens."""
    if max_total_tokens is not None and max_total_tokens > spec.max_positions:
        raise ModelError(
            f"--max-total-tokens is {max_total_tokens}: the model's context has"
            f" {spec.max_positions} (--config-override can say otherwise)"
        )


def _check_memory(needed: int, dtype: torch.dtype, device: torch.device, local_ranks: int) -> None:
    """Raise ModelError if so many bytes don't fit; ranks of one host share a CPU's memory."""
    available = available_bytes(device)
    sharers = local_ranks if device.type == "cpu" else 1
    if available is not None and needed * sharers > available:
        among = f" for each of {sharers} ranks" if sharers > 1 else ""
        raise ModelError(
            f"the weights need {needed / 1e9:.2f} GB{among} as "
            f"{str(dtype).removeprefix('torch.')}; {available / 1e9:.2f} GB of memory are available"
        )
