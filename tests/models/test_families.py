"""What every family must have: golden checkpoints that vary all it reads, and its layouts."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.checkpoints.config_fields import DERIVED, HARMLESS
from support.checkpoints.embedding_models import KINDS as EMBEDDING_KINDS
from support.checkpoints.golden import golden_config
from support.checkpoints.golden_kinds import KINDS
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.checkpoints.nested import text_of
from tokenpod.models.checkpoints.unread import Noted
from tokenpod.models.families import FAMILIES, Family
from tokenpod.models.folder import read_config, read_layout
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.specs.spec import ModelSpec

#: Sizes: a wrong one does not fit the tensors.
SIZES = {
    *("architecture", "vocab_size", "hidden_size", "max_positions", "dtype", "eos_token_ids"),
    *("heads", "kv_heads", "head_dim", "width", "rows", "count", "shared.width"),
    *("key_heads", "value_heads", "key_dim", "value_dim"),
}


CONFIG_SIZES = {
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim"),
    *("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"),
}


def family_of(config: Mapping[str, Any]) -> Family:
    name = text_of(Fields(config, "config.json")).architecture
    return next(family for family in FAMILIES if name in family.architectures)


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    return family_of(config).spec(text_of(Fields(config, "config.json")).fields, 256)


def configs_of(family: Family) -> list[dict[str, Any]]:
    """Those of the golden checkpoints of a family, but for those that are part of a model."""
    configs = map(golden_config, KINDS)
    return [x for x in configs if x["architectures"][0] in family.architectures]


def encoders_of(family: Family) -> Iterator[ModelSpec]:
    """Of embedding models that are a family's but that tokens see those behind them, too."""
    for kind in EMBEDDING_KINDS.values():
        name = re.sub("(Text)?Model$", "ForCausalLM", kind.model)
        if name in family.architectures and "use_bidirectional_attention" in kind.settings:
            config = getattr(transformers, kind.model).config_class(**kind.settings).to_dict()
            yield spec_of({**config, **kind.settings, "architectures": [name]})


def model_of(architecture: str) -> type | None:
    """transformers' class of this name, if it has one."""
    return getattr(transformers, architecture, None)


by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.architectures[0])


def test_the_page_on_models_names_every_architecture():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    missing = {name for x in FAMILIES for name in x.architectures if f"`{name}`" not in page}
    assert not missing


@by_family
def test_every_family_has_a_golden_checkpoint(family):
    assert configs_of(family)


@by_family
def test_every_field_is_read_or_known_to_change_nothing(family):
    """So a field that transformers adds, and that changes what is computed, is noticed."""
    written, asked = set(), set()
    for config in configs_of(family):
        noted = Noted(config)
        spec_of(noted)
        written |= set(noted)
        asked |= noted.asked
    unread = written - asked - HARMLESS - DERIVED
    assert not unread


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """A spec's properties by name, whatever the layer."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(
                getattr(value, field.name), f"{at}.{field.name}" if at else field.name
            )
    elif at == "layers":
        for layer in set(value):
            yield from leaves(layer, "layer")
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        for name, inner in value._asdict().items():
            yield from leaves(inner, f"{at}.{name}")
    else:
        yield at, value.name if isinstance(value, Enum) else str(value)


def values_of(specs: list[ModelSpec]) -> dict[str, set[Any]]:
    found: dict[str, set[Any]] = defaultdict(set)
    for spec in specs:
        for name, value in leaves(spec):
            if name.rpartition(".")[2] not in SIZES:
                found[name].add(value)
    return found


def others(value: Any) -> list[Any]:
    """What a field might say instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value / 2]
    if value is None:
        return [True, 4, 0.5]
    return (
        {"silu": ["gelu"], "gelu": ["relu"]}.get(value, ["relu"]) if isinstance(value, str) else []
    )


@by_family
def test_golden_checkpoints_vary_what_the_config_decides(family):
    """What a change of one field changes in the spec has two values, or is there in some only."""
    configs = configs_of(family)
    specs = [spec_of(config) for config in configs]
    found = values_of([*specs, *encoders_of(family)])
    some = {name for spec in specs for name in found.keys() - values_of([spec]).keys()}
    decided = set()
    for config, spec in zip(configs, specs, strict=True):
        before = values_of([spec])
        noted = Noted(config)
        spec_of(noted)
        for name in (noted.asked & set(config)) - CONFIG_SIZES:
            for other in others(config[name]):
                try:
                    changed = values_of([spec_of({**config, name: other})])
                except (ModelError, AssertionError):
                    continue
                decided |= {x for x in before if x in changed and before[x] != changed[x]}
    alike = {name for name in decided - some if len(found[name]) < 2}
    assert not alike


@pytest.mark.parametrize(
    ("name", "written", "terse"),
    [
        ("gemma3", "layer_types", {"sliding_window_pattern": 2}),
        ("qwen2-window", "layer_types", {"max_window_layers": 1}),
        ("exaone4", "layer_types", {"sliding_window_pattern": 2}),
        ("cohere2-varied", "layer_types", {"sliding_window_pattern": 2}),
        ("smollm3", "no_rope_layers", {"no_rope_layer_interval": 4}),
        ("lfm2-varied", "layer_types", {"full_attn_idxs": [2]}),
        ("gpt-bigcode", "num_key_value_heads", {"multi_query": True}),
        ("minimax-m2", "rope_parameters", {"rotary_dim": 8, "rope_theta": 1e4}),
    ],
)
def test_terse_configs(name, written, terse):
    config = {**golden_config(name), **terse}
    without = {field: value for field, value in config.items() if field != written}
    assert written in config
    assert spec_of(without) == spec_of(config)


def first_kind(family: Family) -> str:
    return next(x for x in KINDS if golden_config(x)["architectures"][0] in family.architectures)


def read(folder: Path) -> dict[str, Any]:
    with Checkpoint(folder) as checkpoint:
        return read_weights(
            checkpoint,
            read_layout(folder, checkpoint).weights,
            dtype=torch.float32,
            device=torch.device("cpu"),
            progress=lambda done, total: None,
        )


@by_family
def test_published_layouts_load(family, golden, tmp_path):
    """With each prefix, and with the buffers that files of this family hold."""
    folder = golden(first_kind(family)).folder
    spec, whole = read_config(folder), read(folder)
    names = family.names(spec) if callable(family.names) else family.names
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    embedding = f"{names.embedding}.weight"
    own = next(x for x in family.prefixes if f"{x}{embedding}" in stored)
    for prefix in family.prefixes:
        if own.endswith(".model.") or prefix.endswith(".model."):
            continue  # the head moves too: golden checkpoints have both
        tensors = {
            prefix + name.removeprefix(own) if name.startswith(own) else name: tensor
            for name, tensor in stored.items()
        }
        for ending in names.surplus:
            tensors[prefix + names.layer.format(i=0) + "x" + ending] = torch.ones(2)
        save_file(tensors, tmp_path / "model.safetensors")
        again = read(tmp_path)
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[name], whole[name]) for name in whole)


#: Tensors of published files that transformers ignores by these patterns; {layers}: of the model.
IGNORED = {
    r"model\.layers\.47.*": "model.layers.{layers}.eh_proj.weight",
    r"model\.layers\.80.*": "model.layers.{layers}.eh_proj.weight",
    r"model\.layers\.46.*": "model.layers.{layers}.eh_proj.weight",
    r"model\.layers\.61.*": "model.layers.{layers}.eh_proj.weight",
    r"model\.layers\.92.*": "model.layers.{layers}.eh_proj.weight",
    "mtp": "model.mtp_emb_norm.0.weight",
    "^model.visual.*": "model.visual.patch_embed.bias",
    r"^model\.mtp\.": "model.mtp.layers.0.input_layernorm.weight",
    "^mtp.*": "mtp.layers.0.input_layernorm.weight",
    "mtp.*": "mtp.layers.0.input_layernorm.weight",
    "attn.bias": "transformer.h.0.attn.bias",
    "crossattention.bias": "transformer.h.0.crossattention.bias",
    "attention.bias": "gpt_neox.layers.0.attention.bias",
    "attention.masked_bias": "gpt_neox.layers.0.attention.masked_bias",
}


def test_what_transformers_ignores_is_no_error(golden):
    tried = set()
    for family in FAMILIES:
        for name in family.architectures:
            for pattern in (
                getattr(model_of(name), "_keys_to_ignore_on_load_unexpected", None) or ()
            ):
                folder = golden(first_kind(family)).folder
                layers = len(read_config(folder).layers)
                with_more(folder, IGNORED[pattern].format(layers=layers))
                tried.add(pattern)
    assert tried == {*IGNORED}


@pytest.mark.parametrize("name", ["gemma3-images", "mistral3-newer"])
def test_tensors_of_images_are_counted_and_not_read(name, golden, load_folder):
    folder = golden(name).folder
    stored = load_file(folder / "model.safetensors")
    model = load_folder(folder)
    assert sum(model.unused.values()) == sum("language_model" not in x for x in stored) - (
        "lm_head.weight" in stored
    )
    assert {part.split(".")[-1] for part in model.unused} == {
        "vision_tower",
        "multi_modal_projector",
    }
    with pytest.raises(ModelError, match=r"has no tensor audio_tower\.x"):
        with_more(folder, "audio_tower.x")


def with_more(folder: Path, name: str) -> None:
    changed = folder.parent / f"{folder.name}-more"
    shutil.copytree(folder, changed, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, name: torch.ones(2)}, changed / "model.safetensors")
    read(changed)


def test_what_the_config_of_a_text_model_leaves_out_is_gemma_3s(tmp_path):
    """As Gemma 3 4B is published."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    spec = read_config(tmp_path)
    assert (spec.head_counts[0], spec.vocab_size, spec.max_positions) == (8, 262_208, 131_072)
    assert spec.kv_windows == tuple(None if i % 6 == 5 else 1024 for i in range(34))
    assert spec.eos_token_ids == {1, 106}
    assert spec.dtype is torch.bfloat16
    assert spec.head.tied
    near, far = (spec.layers[i].mixer.positions.inverse_frequencies for i in (0, 5))
    assert near[1] == pytest.approx(1e4 ** (-2 / 256))
    assert far[1] == pytest.approx(1e6 ** (-2 / 256) / 8)


def test_another_text_model_is_refused(tmp_path):
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"model_type": "mixtral"},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    message = r"text_config: model_type 'mixtral' is not supported \(supported: mistral, ministral3"
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)
