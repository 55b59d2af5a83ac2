"""No field of a config.json, whatever it says, costs more than an error: no time, no memory."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.golden import golden_config
from support.checkpoints.golden_kinds import KINDS
from support.clients.hostile_fields import HOSTILE, attack, bounded, nested
from tokenpod.models.adapters.config import read_lora
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.families import FAMILIES
from tokenpod.models.folder import read_layout, tier_of
from tokenpod.models.load import load_model
from tokenpod.models.tier.bounds import check_bounds
from tokenpod.models.tier.errors import NotServed


def first_kinds() -> list[str]:
    """A kind of each family, found without making configs."""
    found: dict[object, str] = {}
    for name, kind in KINDS.items():
        found.setdefault((kind.model, kind.disguise), name)
    return list(found.values())


@pytest.mark.parametrize(
    ("name", "each"),
    [
        *(("llama-yarn-mscale", 4), ("deepseek-v3", 2), ("dbrx", 2), ("gemma3-images", 1)),
        *(pytest.param(x, len(HOSTILE), marks=pytest.mark.slow) for x in first_kinds()),
    ],
)
def test_a_field_of_our_families(name, each, tmp_path):
    path = tmp_path / "config.json"
    assert attack(golden_config(name), path, lambda x: read_layout(x, None), ModelError, each)


@pytest.mark.parametrize(
    ("name", "each"),
    [("mamba2", 1), *(pytest.param(x, 4, marks=pytest.mark.slow) for x in ("apertus", "t5"))],
)
def test_a_field_of_a_family_of_transformers(name, each, tmp_path):
    path = tmp_path / "config.json"
    assert attack(golden_config(name), path, lambda x: tier_of(x, 256), ModelError, each)


def test_as_many_layers_and_experts_as_there_may_be_each_are_too_many_together(tmp_path):
    config = golden_config("mixtral") | {"num_hidden_layers": 4096, "num_local_experts": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with bounded("4,096 layers"), pytest.raises(ModelError, match="have 4,194,304 experts; at mos"):
        read_layout(tmp_path, None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 1025, "num_hidden_layers is 1025; at most 1,024 is read"),
        ("mamba_chunk_size", 1 << 30, "mamba_chunk_size is 1073741824; at most 4,194,304"),
        ("vocab_size", 1 << 32, "vocab_size is 4294967296; at most 2,147,483,648"),
        ("num_experts", 10**4000, r"num_experts is 10000000000000000000\.\.\.; at most 32,768"),
        ("layer_types", ["x"] * 70_000, "layer_types has 70,000 entries"),
        ("deep", nested(100), "deep is nested more than 16 deep"),
        ("text", {"num_layers": 1 << 40}, r"text\.num_layers is 1099511627776"),
    ],
)
def test_a_number_that_a_class_of_transformers_would_trust(field, value, message):
    with pytest.raises(NotServed, match=message):
        check_bounds({"hidden_size": 64, field: value})


def test_every_family_is_attacked():
    attacked = {golden_config(name)["architectures"][0] for name in first_kinds()}
    assert all(attacked.intersection(family.architectures) for family in FAMILIES)


def test_a_field_of_an_adapter(tmp_path):
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "alpha_pattern": {"q_proj": 4},
        "rank_pattern": {"q_proj": 4},
        "use_rslora": False,
        "bias": "none",
        "modules_to_save": None,
        "target_modules": ["q_proj"],
    }
    path = tmp_path / "adapter_config.json"
    assert attack(config, path, lambda x: read_lora(read_fields(x / path.name)), ModelError)


@pytest.mark.parametrize(
    ("name", "config", "tensor", "message"),
    [
        ("deepseek-v3", {"index_topk": 64}, None, "index_topk is 64, which is not supported"),
        ("qwen3-5", {"attn_output_gate": False}, None, "attn_output_gate False is not supp"),
        ("llama", {"embedding_multiplier": 12.0}, None, "embedding_multiplier is 12.0, which"),
        ("qwen3", {}, "attn_gate.weight", r"no tensor model.layers.0.attn_gate.weight"),
    ],
)
def test_a_newer_kind_is_named_before_weights_are_read(
    golden, tmp_path, name, config, tensor, message
):
    """By the field or tensor that its family does not know."""
    shutil.copytree(golden(name).folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if tensor is not None:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors[f"model.layers.0.{tensor}"] = torch.zeros(3, 3)
        save_file(tensors, tmp_path / "model.safetensors")
    read = []
    with pytest.raises(ModelError, match=message):
        load_model(
            tmp_path,
            dtype=torch.float32,
            device=torch.device("cpu"),
            progress=lambda done, total: read.append(done),
        )
    assert not any(read)
