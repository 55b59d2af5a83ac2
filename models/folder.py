"""What a model's folder holds, by its config.json and the names of its tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenpod.core.images import SIGHTS, processor_of
from tokenpod.models.checkpoints.checkpoint import Checkpoint, check
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields, read_fields
from tokenpod.models.checkpoints.nested import Nesting, Text, split, text_of
from tokenpod.models.checkpoints.overrides import Overridden
from tokenpod.models.checkpoints.unread import Noted, check_all_read
from tokenpod.models.decoders.facts import ModelFacts, ends_within
from tokenpod.models.families import ENCODERS, FAMILIES, Family
from tokenpod.models.families.family import dtype_of
from tokenpod.models.formats import reader_for
from tokenpod.models.layouts import layout_of
from tokenpod.models.layouts.module import FamilyLayout, PublishedLayout
from tokenpod.models.layouts.reader import PublishedReader
from tokenpod.models.pooling.files import pooling_of, task_of
from tokenpod.models.specs.kv_scales import scale_names
from tokenpod.models.specs.layout import Layout, embedding_of, heads_named, stored_table, with_head
from tokenpod.models.specs.pooling_spec import PoolingSpec
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.specs.weight_table import beyond_names, weights_of
from tokenpod.models.weights.names import head_name

if TYPE_CHECKING:
    from tokenpod.models.tier.choose import Loader


#: What config.json has of Medusa heads, and what their tensors begin with in a model's checkpoint.
HEADS, HEADS_WITHIN = "medusa_num_heads", "medusa_head."


#: The end of a class's name without a head that writes text: such a model makes vectors.
_WITHOUT_HEAD = re.compile(r"(?<!LMHead)(TextModel|Model|ForSequenceClassification)$")


class Described(NamedTuple):
    """What config.json says."""

    family: Family
    spec: ModelSpec
    #: Where its tensors are in a checkpoint of several models; None: the checkpoint has no others.
    nesting: Nesting | None
    #: How its weights are quantised; None: they are not, or as the family has them.
    published: PublishedLayout | None


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
        return describe(folder, max_total_tokens, override).spec
    return tier_of(folder, max_total_tokens, override).spec


def is_native(folder: Path) -> bool:
    """Whether one of our families has the model. Raises ModelError without a config.json."""
    return _family(read_text(folder)) is not None


def sees_images(folder: Path) -> bool:
    """Whether images of the model in a folder are served: its text model must be one of ours."""
    names = read_fields(folder / "config.json").texts("architectures")
    known = bool(names) and names[0] in SIGHTS
    return known and processor_of(folder) is not None and is_native(folder)


def read_text(folder: Path) -> Text:
    """The text model that config.json describes. Raises ModelError without one."""
    fields = read_fields(folder / "config.json")
    if HEADS in fields and "architectures" not in fields:
        base = fields.values.get("base_model_name_or_path")
        raise ModelError(
            f"{fields.source} is that of Medusa heads: serve their model, {base}, with --speculate"
            " and this folder as --draft-model"
        )
    return text_of(fields)


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

    architecture, fields, nesting = read_text(folder)
    name = next(iter(fields.texts("architectures")), "none")
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
            architecture,
            fields,
            nesting,
            dtype=dtype_of(fields),
            eos_token_ids=_end_tokens(folder, fields.token_ids("eos_token_id")),
            served=max_total_tokens,
        )
    except NotServed as reason:
        raise unsupported(fields, reason) from None


def read_layout(
    folder: Path,
    checkpoint: Checkpoint | None,
    max_total_tokens: int | None = None,
    quantize: str | None = None,
    *,
    quantize_head: bool = False,
    override: Mapping[str, Any] | None = None,
    task: str = "auto",
) -> Layout:
    """The model in `folder`, and its weights, checked against `checkpoint` if there is one.

    `quantize` is the format that products' weights are made into, with `quantize_head` the head's
    too; `task` is what is done with it, or "auto"; the others are as `read_config` has them. Raises
    ModelError as that does, and where config.json and tensors don't go together.
    """
    family, spec, nesting, published = describe(folder, max_total_tokens, override)
    pooling = read_pooling(folder, spec, task)
    reader = reader_for(spec, quantize, published, checkpoint, head=quantize_head)
    names = family.names_of(spec)
    there = (
        p for p in family.prefixes if checkpoint and f"{p}{names[0].embedding}.weight" in checkpoint
    )
    prefix = next(there, family.prefixes[0])
    layouts = [dataclasses.replace(x, head=head_name(x, prefix)) for x in names]
    head = f"{layouts[0].head}."
    has_head = checkpoint is None or any(name.startswith(head) for name in checkpoint.names)
    if pooling is not None or not has_head:
        # What is not there is the embedding; what is not asked for is not read.
        spec = dataclasses.replace(spec, head=dataclasses.replace(spec.head, tied=True))
    tables = [(x, weights_of(spec, x, prefix)) for x in layouts]
    packed = published is not None and published.name in family.quantised
    chosen, weights = stored_table(checkpoint, tables, reader, packed=packed)
    if reader is None and any(weight.packed for weight in weights):
        # The files say so, though config.json does not.
        reader = PublishedReader(FamilyLayout(family.quantised[0]), checkpoint)
    stored = checkpoint.names if checkpoint else set()
    if quantize_head and spec.head.tied:
        weights = with_head(weights)
    layout = Layout(
        spec,
        weights,
        scale_names(spec, chosen, prefix, stored),
        chosen,
        prefix,
        reader,
        split(stored, nesting),
        pooling and heads_named(pooling, f"{head}weight" if has_head else embedding_of(weights)),
    )
    if checkpoint is not None:
        optional = [name for layers in layout.scales for name in layers]
        if pooling is not None:
            optional += pooling.tensors
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
            beyond=(
                *(nesting.unused if nesting else ()),
                *beyond_names(spec, chosen, prefix),
                HEADS_WITHIN,
            ),
        )
    return layout


def read_pooling(folder: Path, spec: ModelSpec, task: str = "auto") -> PoolingSpec | None:
    """How a model makes vectors of texts; None: it generates.

    `task` is what the operator says, or "auto". Raises ModelError if the model can't do that.
    """
    text = read_text(folder)
    found = task_of(folder, text.architecture, task, encoder=spec.encodes)
    return pooling_of(folder, text.fields, spec, text.architecture, found)


def describe(
    folder: Path, max_total_tokens: int | None, override: Mapping[str, Any] | None
) -> Described:
    """Family and spec of the model in `folder`. Raises ModelError, also for no family of ours."""
    text = read_text(folder)
    family, nesting = _family(text), text.nesting
    if family is None:
        raise unsupported(text.fields, None)
    published = layout_of(folder, text.fields, family.quantised)
    noted = Noted(text.fields.values)
    spec = family.spec(Fields(noted, text.fields.source), max_total_tokens)
    check_all_read(text.fields, noted, spec.architecture)
    if override:
        fields = Overridden(read_fields(folder / "config.json"), override)
        spec = family.spec(text_of(fields).fields, max_total_tokens)
        fields.check_all_read(spec.architecture)
    if nesting is not None:
        family = dataclasses.replace(family, prefixes=nesting.prefixes)
    eos = ends_within(_end_tokens(folder, spec.eos_token_ids), spec.vocab_size)
    return Described(family, dataclasses.replace(spec, eos_token_ids=eos), nesting, published)


def _end_tokens(folder: Path, by_config: frozenset[int]) -> frozenset[int]:
    """Tokens that end a text: those of generation_config.json, otherwise of config.json."""
    if not (folder / "generation_config.json").is_file():
        return by_config
    generation = read_fields(folder / "generation_config.json")
    return generation.token_ids("eos_token_id") or by_config


def _family(text: Text) -> Family | None:
    """None: we don't have the model; transformers may."""
    names = (text.architecture, _WITHOUT_HEAD.sub("ForCausalLM", text.architecture))
    return next(
        (
            family
            for name in dict.fromkeys(names)
            for family in (*FAMILIES, *ENCODERS)
            if name in family.architectures and family.takes(text.fields)
        ),
        None,
    )


def unsupported(fields: Fields, reason: Exception | None) -> ModelError:
    """That a model is not served, for this reason, and where it stands which are."""
    names = ", ".join(fields.texts("architectures")) or "none"
    why = f": {reason}" if reason else ""
    return ModelError(
        f"{fields.source}: architecture {names} is not supported{why}; `tokenpod models` lists "
        "those that are"
    )
