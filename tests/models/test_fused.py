"""An adapter that is fused while weights are read: what a merged checkpoint says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.golden_kinds import MAX_POSITIONS
from support.checkpoints.lora_folders import merge, write_lora
from tokenpod.models.adapters.fused import FusedCheckpoint
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.load import load_model

#: Modules of a layer: in parts of a fused product, transposed, experts, the head.
MODULES = {
    "llama-grouped-tied": ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"),
    "phi3": ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"),
    "gpt2": ("transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"),
    "mixtral": (
        "model.layers.0.block_sparse_moe.experts.1.w1",
        "model.layers.1.block_sparse_moe.experts.0.w2",
        "model.layers.1.block_sparse_moe.gate",
    ),
    "llama": ("lm_head", "model.layers.0.self_attn.v_proj"),
}


def load(folder: Path, fuse: Path | None = None, **more: Any) -> Any:
    return load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=MAX_POSITIONS,
        fuse=fuse,
        **more,
    )


def written(base: Path, family: str, folder: Path) -> Any:
    transposed = family == "gpt2"
    modules = dict.fromkeys(MODULES[family], 4)
    return write_lora(folder, base, modules, transposed=transposed, fan_in_fan_out=transposed)


@pytest.mark.parametrize("family", MODULES)
def test_a_model_says_what_the_merged_one_says(family, golden, schedule, text, tmp_path):
    base = golden(family).folder
    lora = written(base, family, tmp_path / "a")
    whole = merge(base, lora, tmp_path / "m", transposed=family == "gpt2")
    found, expected, plain = (
        schedule(model) for model in (load(base, lora.folder), load(whole), load(base))
    )
    said = [each.step([(each.sequence(text(6)), 6)])[0] for each in (found, expected, plain)]
    torch.testing.assert_close(said[0], said[1], rtol=0, atol=2e-5)
    assert not torch.allclose(said[1], said[2], atol=1e-2)


@pytest.mark.parametrize("family", ["llama-grouped-tied", "gpt2"])
def test_ranks_read_their_parts_of_what_was_fused(family, golden, tmp_path):
    base = golden(family).folder
    lora = written(base, family, tmp_path / "a")
    whole = merge(base, lora, tmp_path / "m", transposed=family == "gpt2")
    with FusedCheckpoint(base, lora.folder) as fused, Checkpoint(whole) as expected:
        assert fused.names == expected.names
        for name in sorted(fused.names):
            torch.testing.assert_close(fused.read(name), expected.read(name))
            for axis, length in enumerate(fused.shape(name)):
                part = range(length // 2, length)
                torch.testing.assert_close(
                    fused.read(name, axis, part), expected.read(name, axis, part)
                )


def test_formats_are_made_of_the_fused_weights(golden, tmp_path):
    base = golden("llama").folder
    lora = written(base, "llama-grouped-tied", tmp_path / "a")
    whole = merge(base, lora, tmp_path / "m")
    ids = torch.arange(3)
    found, expected = load(base, lora.folder, quantize="int8"), load(whole, quantize="int8")
    assert found.quantization == expected.quantization != ""
    assert found.weight_bytes == expected.weight_bytes
    hidden = torch.ones(3, found.config.hidden_size)
    torch.testing.assert_close(found.logits(hidden)[ids], expected.logits(hidden)[ids])


def test_dora_and_whole_modules_can_be_fused(golden, tmp_path):
    """By what `convert --lora` makes of them, whose own tests have the formula."""
    base = golden("llama").folder
    name, norm = "model.layers.0.self_attn.q_proj", "model.norm.weight"
    lora = write_lora(tmp_path / "a", base, {name: 4}, use_dora=True, modules_to_save=["norm"])
    path = lora.folder / "adapter_model.safetensors"
    stored = load_file(base / "model.safetensors")
    save_file(load_file(path) | {f"base_model.model.{norm}": stored[norm] + 1}, path)
    with FusedCheckpoint(base, lora.folder) as fused:
        lengths = fused.read(f"{name}.weight").norm(dim=1)
        torch.testing.assert_close(lengths, lora.lengths[name])
        assert torch.equal(fused.read(norm), stored[norm] + 1)
        other = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(fused.read(other), stored[other])


REFUSED = {
    "another kind": ({"peft_type": "PROMPT_TUNING"}, "peft_type 'PROMPT_TUNING' is not supported"),
    "a field of tomorrow": ({"use_tomorrow": 3}, "use_tomorrow is 3, which is not supported"),
    "residual base": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(case, golden, tmp_path):
    config, said = REFUSED[case]
    base = golden("llama").folder
    lora = written(base, "llama", tmp_path / "a")
    path = lora.folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ModelError, match=said):
        load(base, lora.folder)


def test_an_adapter_of_another_base_is_refused(golden, tmp_path):
    lora = written(golden("phi3").folder, "phi3", tmp_path / "a")
    with pytest.raises(
        ModelError, match=r"the base has no weight for model.layers.0.self_attn.qkv"
    ):
        load(golden("llama").folder, lora.folder)
    with pytest.raises(ModelError, match=r"there is no adapter_config.json"):
        load(golden("llama").folder, tmp_path)
