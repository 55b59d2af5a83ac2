"""LoRA adapters, merged into their base."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenpod.models.errors import ModelError

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


def test_the_embedding_has_a_layout_of_its_own_and_whole_modules_are_replaced(
    convert_to, golden, adapter, stored
):
    rows, columns = stored["model.embed_tokens.weight"].shape
    first, second = torch.randn(RANK, rows), torch.randn(columns, RANK)
    norm = torch.randn_like(stored["model.norm.weight"])
    embedding = "model.embed_tokens.lora_embedding"
    own = {f"{embedding}_A": first, f"{embedding}_B": second}
    adapter(tensors={**own, "model.norm.modules_to_save.weight": norm})
    made = made_of(convert_to, golden, adapter)
    expected = stored["model.embed_tokens.weight"] + ALPHA / RANK * (second @ first).t()
    torch.testing.assert_close(made["model.embed_tokens.weight"], expected)
    assert torch.equal(made["model.norm.weight"], norm)


@pytest.mark.parametrize(
    ("more", "tensors", "said"),
    [
        ({"use_dora": True}, {}, "use_dora True is not supported"),
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
