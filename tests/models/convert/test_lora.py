"""LoRA adapters, merged into their base."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenpod.models.adapters import lora
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.writer import Planned

RANK, ALPHA = 4, 6.0
QUERY, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture
def stored(golden):
    return load_file(golden("llama").folder / "model.safetensors")


@pytest.fixture
def adapter(stored, tmp_path):
    """Writes an adapter, with what its config says besides; its tensors by name."""
    folder = tmp_path / "adapter"

    def write(more=None, tensors=None):
        folder.mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **(more or {})}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found = {}
        torch.manual_seed(1)
        for name in (QUERY, UP):
            rows, columns = stored[f"{name}.weight"].shape
            found[f"{name}.lora_A.weight"] = torch.randn(RANK, columns)
            found[f"{name}.lora_B.weight"] = torch.randn(rows, RANK)
        found |= tensors or {}
        saved = {f"base_model.model.{name}": tensor for name, tensor in found.items()}
        save_file(saved, folder / "adapter_model.safetensors")
        return found

    write.folder = folder
    return write


def product(tensors, name):
    return tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]


def made_of(convert_to, golden, adapter, **more):
    folder = convert_to(golden("llama").folder, lora=str(adapter.folder), **more)
    return load_file(folder / "model.safetensors")


def test_products_are_added_to_the_weights_that_they_adapt(convert_to, golden, adapter, stored):
    tensors = adapter()
    made = made_of(convert_to, golden, adapter)
    for name in stored:
        stem = name.removesuffix(".weight")
        delta = ALPHA / RANK * product(tensors, stem) if stem in (QUERY, UP) else 0
        torch.testing.assert_close(made[name], stored[name] + delta)
    assert not torch.equal(made[f"{UP}.weight"], stored[f"{UP}.weight"])


def test_scales_are_those_of_the_config(convert_to, golden, adapter, stored):
    tensors = adapter({"use_rslora": True, "alpha_pattern": {"up_proj": 10}})
    made = made_of(convert_to, golden, adapter)
    for name, alpha in ((QUERY, ALPHA), (UP, 10)):
        expected = stored[f"{name}.weight"] + alpha / RANK**0.5 * product(tensors, name)
        torch.testing.assert_close(made[f"{name}.weight"], expected)


def test_doras_outputs_have_the_lengths_that_the_adapter_says(convert_to, golden, adapter, stored):
    """The formula of the paper; two names that files have for the lengths."""
    lengths = {
        f"{QUERY}.lora_magnitude_vector.weight": torch.rand(len(stored[f"{QUERY}.weight"])) + 0.5,
        f"{UP}.lora_magnitude_vector": torch.rand(len(stored[f"{UP}.weight"])) + 0.5,
    }
    tensors = adapter({"use_dora": True}, lengths)
    made = made_of(convert_to, golden, adapter)
    for name, of in zip((QUERY, UP), lengths.values(), strict=True):
        moved = stored[f"{name}.weight"] + ALPHA / RANK * product(tensors, name)
        expected = of[:, None] * moved / torch.linalg.norm(moved, dim=1, keepdim=True)
        torch.testing.assert_close(made[f"{name}.weight"], expected)
    assert torch.equal(made["lm_head.weight"], stored["lm_head.weight"])


def test_doras_outputs_are_columns_where_weights_are_transposed(tmp_path):
    """GPT-2's weights have their outputs in columns (fan_in_fan_out)."""
    torch.manual_seed(1)
    base, first, second = torch.randn(5, 3), torch.randn(2, 5), torch.randn(3, 2)
    lengths = torch.rand(3) + 0.5
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"fan_in_fan_out": True}))
    own = {"lora_A.weight": first, "lora_B.weight": second, "lora_magnitude_vector.weight": lengths}
    saved = {f"base_model.model.h.0.attn.c_attn.{name}": each for name, each in own.items()}
    save_file(saved, tmp_path / "adapter_model.safetensors")
    plan = Planned("h.0.attn.c_attn.weight", torch.float32, (5, 3), base.clone)
    (made,) = lora.merged([plan], tmp_path)
    moved = base + 0.5 * (second @ first).t()
    expected = lengths * moved / torch.linalg.norm(moved, dim=0)
    torch.testing.assert_close(made.read(), expected)


def test_the_embedding_has_a_layout_of_its_own_and_whole_modules_are_replaced(
    convert_to, golden, adapter, stored
):
    rows, columns = stored["model.embed_tokens.weight"].shape
    first, second = torch.randn(RANK, rows), torch.randn(columns, RANK)
    norm = torch.randn_like(stored["model.norm.weight"])
    embedding = "model.embed_tokens.lora_embedding"
    own = {f"{embedding}_A": first, f"{embedding}_B": second}
    # PEFT saves the base's table beside them.
    own["model.embed_tokens.base_layer.weight"] = stored["model.embed_tokens.weight"].clone()
    adapter(tensors={**own, "model.norm.modules_to_save.weight": norm})
    made = made_of(convert_to, golden, adapter)
    expected = stored["model.embed_tokens.weight"] + ALPHA / RANK * (second @ first).t()
    torch.testing.assert_close(made["model.embed_tokens.weight"], expected)
    assert torch.equal(made["model.norm.weight"], norm)


def test_a_head_that_is_tied_to_the_embedding_follows_it(golden, convert_to, tmp_path):
    """PEFT saves the factors twice (`ensure_weight_tying`); others of the head are refused."""
    base, folder = golden("llama-grouped-tied").folder, tmp_path / "adapter"
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    first, second = torch.randn(RANK, table.shape[0]), torch.randn(table.shape[1], RANK)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "ensure_weight_tying": True}
    names = "model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_B"
    head = {"lm_head.lora_A.weight": second.t(), "lm_head.lora_B.weight": first.t()}
    tensors = dict(zip(names, (first, second), strict=True)) | head
    tensors |= {"lm_head.base_layer.weight": table, "model.embed_tokens.base_layer.weight": table}

    def save(**more):
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        own = {f"base_model.model.{n}": t.contiguous().clone() for n, t in (tensors | more).items()}
        save_file(own, folder / "adapter_model.safetensors")

    save()
    made = load_file(convert_to(base, lora=str(folder)) / "model.safetensors")
    expected = table + ALPHA / RANK * (second @ first).t()
    torch.testing.assert_close(made["model.embed_tokens.weight"], expected)
    assert "lm_head.weight" not in made
    save(**{"lm_head.lora_A.weight": second.t() + 1})
    planned = [Planned("model.embed_tokens.weight", torch.float32, table.shape, table.clone)]
    with pytest.raises(ModelError, match="the base has no weight for lm_head"):
        lora.merged(planned, folder)


@pytest.mark.parametrize(
    ("more", "tensors", "said"),
    [
        ({"use_dora": True}, {}, f"it has no {QUERY}.lora_magnitude_vector.weight"),
        (
            {"use_dora": True},
            {f"{QUERY}.lora_magnitude_vector.weight": torch.ones(3)},
            f"{QUERY}.lora_magnitude_vector.weight has shape [3]; {QUERY}.weight has",
        ),
        ({"peft_type": "IA3"}, {}, "peft_type 'IA3' is not supported"),
        ({}, {"model.layers.9.x.lora_A.weight": torch.ones(1)}, "no weight for model.layers.9.x"),
        ({}, {f"{UP}.lora_A.weight": torch.ones(RANK, 3)}, f"{UP}.weight of the base has [1"),
    ],
)
def test_what_does_not_fit_is_refused(convert_to, golden, adapter, more, tensors, said):
    adapter(more, tensors)
    with pytest.raises(ModelError, match=r"^[^\n]+$") as caught:
        made_of(convert_to, golden, adapter)
    assert said in str(caught.value)
