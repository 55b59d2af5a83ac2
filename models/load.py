"""From a folder with config.json and safetensors to a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tokenpod.kernels.group import Group
from tokenpod.kernels.parallel import parallel
from tokenpod.kernels.registry import operations_for
from tokenpod.models.adapters.store import Space, store_of
from tokenpod.models.adapters.targets import copied_numbers, slot_numbers, targets_of
from tokenpod.models.adapters.virtual import VirtualBase
from tokenpod.models.checkpoint import Checkpoint, check
from tokenpod.models.decoder import Decoder
from tokenpod.models.errors import ModelError
from tokenpod.models.facts import LoadedModel, ModelFacts, ends_within
from tokenpod.models.families import FAMILIES, Family
from tokenpod.models.families.family import dtype_of
from tokenpod.models.fields import Fields, read_fields
from tokenpod.models.formats import bytes_needed, reader_for
from tokenpod.models.kv_scales import read_scales, scale_names
from tokenpod.models.layout import Layout, stored_table, with_head
from tokenpod.models.layouts import layout_of
from tokenpod.models.layouts.module import FamilyLayout, PublishedLayout
from tokenpod.models.layouts.reader import PublishedReader
from tokenpod.models.memory import available_bytes, freed_at_once
from tokenpod.models.names import beyond_names, head_name, weights_of
from tokenpod.models.overrides import Overridden
from tokenpod.models.reading import Progress, read_weights
from tokenpod.models.shard import WHOLE, Shard
from tokenpod.models.spec import ModelSpec
from tokenpod.models.verify import verified

if TYPE_CHECKING:
    from tokenpod.models.tier.choose import Loader

__all__ = ["Layout", "ModelError", "load_model", "read_config", "read_layout"]


def read_config(
    folder: Path,
    max_total_tokens: int | None = None,
    override: Mapping[str, Any] | None = None,
) -> ModelFacts:
    """What config.json (and generation_config.json, for the end-of-text tokens) say.

    `max_total_tokens` is the longest sequence that will be served; None: what the model can.
    `override` replaces fields of config.json. Raises ModelError if a file or field is missing or
    wrong, or the architecture is unknown.
    """
    if is_native(folder):
        return _read_config(folder, max_total_tokens, override).spec
    return tier_of(folder, max_total_tokens, override).spec


def _check_length(spec: ModelFacts, max_total_tokens: int | None) -> None:
    """Raise ModelError unless the model's context has so many tokens."""
    if max_total_tokens is not None and max_total_tokens > spec.max_positions:
        raise ModelError(
            f"--max-total-tokens is {max_total_tokens}: the model's context has"
            f" {spec.max_positions} (--config-override can say otherwise)"
        )


def is_native(folder: Path) -> bool:
    """Whether one of our families has the model. Raises ModelError without a config.json."""
    return _family(read_fields(folder / "config.json")) is not None


def tier_of(
    folder: Path,
    max_total_tokens: int | None = None,
    override: Mapping[str, Any] | None = None,
) -> Loader:
    """The model of another family: transformers computes it, if it can.

    Raises ModelError with the reason if it can't.
    """
    # Not above: transformers takes its time to load, and our families do without.
    from tokenpod.models.tier.choose import loader_of
    from tokenpod.models.tier.errors import NotServed

    fields = read_fields(folder / "config.json")
    names = fields.texts("architectures")
    name = names[0] if names else "none"
    layout = layout_of(folder, fields)
    if layout is not None:
        raise ModelError(
            f"{name} is computed by transformers, with dense weights: its quantization_config says "
            f"{layout.name}"
        )
    if override:
        raise ModelError(
            f"config_override names {', '.join(override)}: {name} is computed by transformers, "
            "with its config.json as it is"
        )
    try:
        return loader_of(
            name,
            fields,
            dtype=dtype_of(fields),
            eos_token_ids=_end_tokens(folder, fields.token_ids("eos_token_id")),
            served=max_total_tokens,
        )
    except NotServed as reason:
        raise _unsupported(fields, reason) from None


def read_layout(
    folder: Path,
    checkpoint: Checkpoint | None,
    max_total_tokens: int | None = None,
    quantize: str | None = None,
    *,
    quantize_head: bool = False,
    override: Mapping[str, Any] | None = None,
) -> Layout:
    """The model in `folder`, and its weights, checked against `checkpoint` if there is one.

    `quantize` is the format that products' weights are made into, with `quantize_head` the head's
    too; the others are as `read_config` has them. Raises ModelError as that does, and where
    config.json and tensors don't go together.
    """
    family, spec, published = _read_config(folder, max_total_tokens, override)
    reader = reader_for(spec, quantize, published, checkpoint, head=quantize_head)
    names = family.names_of(spec)
    there = (
        p for p in family.prefixes if checkpoint and f"{p}{names[0].embedding}.weight" in checkpoint
    )
    prefix = next(there, family.prefixes[0])
    layouts = [dataclasses.replace(x, head=head_name(x, prefix)) for x in names]
    head = f"{layouts[0].head}."
    if checkpoint is not None and not any(name.startswith(head) for name in checkpoint.names):
        spec = dataclasses.replace(spec, head=dataclasses.replace(spec.head, tied=True))
    tables = [(x, weights_of(spec, x, prefix)) for x in layouts]
    packed = published is not None and published.name in family.quantised
    chosen, weights = stored_table(checkpoint, tables, reader, packed=packed)
    if reader is None and any(weight.packed for weight in weights):
        # The files say so, though config.json does not.
        reader = PublishedReader(FamilyLayout(family.quantised[0]), checkpoint)
    stored = checkpoint.names if checkpoint else set()
    parts = {part: sum(name.startswith(part) for name in stored) for part in family.unused}
    unused = {part.rstrip("."): count for part, count in parts.items() if count}
    if quantize_head and spec.head.tied:
        weights = with_head(weights)
    layout = Layout(spec, weights, scale_names(spec, chosen, prefix, stored), reader, unused)
    if checkpoint is not None:
        optional = [name for layers in layout.scales for name in layers]
        if spec.head.tied:
            optional.append(f"{head}weight")
        if isinstance(reader, PublishedReader):
            optional += reader.idle_biases(weights, spec.architecture)
        check(
            checkpoint,
            layout.weights,
            spec.architecture,
            reader=reader,
            optional=optional,
            surplus=chosen.surplus,
            beyond=(*family.unused, *beyond_names(spec, chosen, prefix)),
        )
    return layout


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
        with (
            Checkpoint(folder) as checkpoint,
            verified(folder, checkpoint.files, required=require_manifest, share=share),
        ):
            return _load_tier(tier, checkpoint, dtype=dtype, device=device, progress=progress)
    read = _read_config(folder, max_total_tokens, override)
    family, spec = read.family, read.spec
    _check_length(spec, max_total_tokens)
    shard.check(spec)
    with (
        _opened(folder, fuse) as checkpoint,
        verified(folder, checkpoint.files, required=require_manifest, share=share),
    ):
        layout = read_layout(
            folder,
            checkpoint,
            max_total_tokens,
            quantize,
            quantize_head=quantize_head,
            override=override,
        )
        spec, weights = layout.spec, layout.weights
        dtype = dtype or spec.dtype or torch.float32
        needed = bytes_needed(weights, shard, dtype, layout.reader)
        if adapters is not None:
            numbers = adapters.slots * slot_numbers(weights, shard, adapters.rank)
            numbers += adapters.heads * copied_numbers(weights, shard)
            needed += numbers * dtype.itemsize
        _check_memory(needed, dtype, device, local)
        try:
            tensors = read_weights(
                checkpoint,
                weights,
                dtype=dtype,
                device=device,
                progress=progress,
                shard=shard,
                reader=layout.reader,
            )
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelError(f"{folder}: not enough memory for the weights ({error})") from None
        scales = read_scales(checkpoint, layout.scales, spec.kv.heads, shard, device)
    ops = operations_for(device, dtype)
    store = None
    if adapters is not None:
        positions = min(max_total_tokens or spec.max_positions, spec.max_positions)
        virtual = VirtualBase(spec, shard, dtype, positions)
        store = store_of(targets_of(family, spec), weights, tensors, adapters, virtual, ops)
    return Decoder(
        shard.config(spec),
        tensors,
        parallel(ops, group) if group else ops,
        parameters=layout.parameters,
        kv_scales=scales,
        unused=layout.unused,
        adapters=store,
        quantization=layout.reader.name if layout.reader else "",
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
        ops = operations_for(device, dtype)
        return tier.load(checkpoint, dtype=dtype, device=device, ops=ops, progress=progress)
    except NotServed as reason:
        raise _unsupported(tier.fields, reason) from None
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"not enough memory for the weights ({error})") from None


class _Config(NamedTuple):
    family: Family
    spec: ModelSpec
    #: How its weights are quantised; None: they are not, or as the family has them.
    published: PublishedLayout | None


def _read_config(
    folder: Path, max_total_tokens: int | None, override: Mapping[str, Any] | None
) -> _Config:
    fields = read_fields(folder / "config.json")
    family = _family(fields)
    if family is None:
        raise _unsupported(fields, None)
    published = layout_of(folder, fields, family.quantised)
    if override:
        fields = Overridden(fields, override)
    spec = family.spec(fields, max_total_tokens)
    if isinstance(fields, Overridden):
        fields.check_all_read(spec.architecture)
    eos = ends_within(_end_tokens(folder, spec.eos_token_ids), spec.vocab_size)
    return _Config(family, dataclasses.replace(spec, eos_token_ids=eos), published)


def _end_tokens(folder: Path, by_config: frozenset[int]) -> frozenset[int]:
    """Tokens that end a text: those of generation_config.json, otherwise of config.json."""
    if not (folder / "generation_config.json").is_file():
        return by_config
    generation = read_fields(folder / "generation_config.json")
    return generation.token_ids("eos_token_id") or by_config


def _family(fields: Fields) -> Family | None:
    """None: we don't have the model; transformers may."""
    names = fields.texts("architectures")
    return next((f for f in FAMILIES if names and names[0] in f.architectures), None)


def _unsupported(fields: Fields, reason: Exception | None) -> ModelError:
    names = ", ".join(fields.texts("architectures")) or "none"
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    why = f": {reason}" if reason else ""
    return ModelError(
        f"{fields.source}: architecture {names} is not supported{why} (supported: {known}; and "
        "what `tokenpod models` says transformers computes)"
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
