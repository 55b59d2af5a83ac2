"""Checkpoints that also see or hear, by their published names: their text is transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.config_fields import DERIVED, HARMLESS
from support.checkpoints.golden import golden_config
from support.checkpoints.golden_kinds import KINDS, NESTED_KINDS
from support.engines.small_engines import Engine, requests_of
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.checkpoints.nested import NESTED, TEXT_MODELS, text_of
from tokenpod.models.checkpoints.unread import Noted
from tokenpod.models.families import FAMILIES
from tokenpod.models.folder import read_config
from tokenpod.models.footprint import footprint_of

TOLERANCE = 1e-4
#: Their text models and layouts are those of others that each run tries.
RARER = {
    *("aya-vision", "exaone4.5", "glm-asr", "got-ocr2", "idefics3", "lighton-ocr", "llava-next"),
    *("llava-onevision", "minicpm-v4.6", "ovis2", "qwen2-audio", "qwen3-asr", "video-llama3"),
    *("vip-llava", "voxtral"),
}
NATIVE = {name for family in FAMILIES for name in family.architectures}


def kinds(names: Iterable[str]) -> list[Any]:
    """Those that are not tried in every run are marked."""
    assert {*NESTED_KINDS} >= RARER
    return [pytest.param(x, marks=pytest.mark.slow) if x in RARER else x for x in names]


@pytest.mark.parametrize("name", kinds(NESTED_KINDS))
def test_texts_are_those_of_transformers(name, golden, text):
    """Greedy tokens and log probabilities; `Info` and the start have the published name."""
    checkpoint = golden(name)
    engine = Engine(checkpoint.folder)
    config = json.loads((checkpoint.folder / "config.json").read_text())
    assert engine.model.config.architecture == config["architectures"][0]
    prompts = [text(length, seed=length) for length in (23, 9)]
    client = engine.answer(requests_of(prompts, scored=True))
    for i, prompt in enumerate(prompts):
        outputs = client.tokens[i]
        truth = checkpoint.logprobs([*prompt, *outputs[:-1]])
        said = torch.tensor([*client.scored[i], *client.logprobs[i]])
        follow = torch.tensor([*prompt[1:], *outputs])[:, None]
        torch.testing.assert_close(said, truth.gather(1, follow)[:, 0], rtol=0, atol=TOLERANCE)
        assert outputs == truth[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.compute
@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize("name", kinds(x for x, kind in NESTED_KINDS.items() if not kind.disguise))
def test_names_as_transformers_has_them_are_read_too(name, golden, tmp_path, text):
    """What it saves has older names for most, by which such checkpoints were published."""
    checkpoint = golden(name)
    shutil.copytree(checkpoint.folder, tmp_path, dirs_exist_ok=True)
    tensors = {x: tensor.clone() for x, tensor in checkpoint.model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    one, other = (
        Engine(folder).answer(requests_of([text(9)], scored=True))
        for folder in (checkpoint.folder, tmp_path)
    )
    assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def test_every_name_has_a_checkpoint():
    tried = {golden_config(name)["architectures"][0] for name in NESTED_KINDS}
    # Of the golden checkpoints of our families.
    tried |= {f"{x}ForConditionalGeneration" for x in ("Gemma3", "Mistral3", "PaliGemma")}
    assert tried | {*ALIKE} == {*NESTED}
    assert all(NESTED[name] == NESTED[other] for name, other in ALIKE.items())


#: Names that mean the same.
ALIKE = {
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "MiniCPMOcrForConditionalGeneration": "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration": "MiniCPMV4_6ForConditionalGeneration",
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",
}


def native_parts() -> list[str]:
    """Kinds whose text model is of a family of ours, in a config of its own."""
    texts = {x: text_of(Fields(golden_config(x), "config.json")) for x in NESTED_KINDS}
    return [x for x, text in texts.items() if text.architecture in NATIVE and "flat" not in x]


def test_every_field_of_a_text_model_is_read_or_known_to_change_nothing():
    for name in native_parts():
        architecture, fields, _ = text_of(Fields(golden_config(name), "config.json"))
        family = next(x for x in FAMILIES if architecture in x.architectures)
        alone = [x for x in map(golden_config, KINDS) if x["architectures"][0] == architecture]
        asked = set[str]()
        for config in (fields.values, *alone):
            noted = Noted(dict(config))
            family.spec(Fields(noted, "config.json"), 256)
            asked |= noted.asked
        unread = {*fields.values} - asked - HARMLESS - DERIVED
        assert not unread, name


def test_the_other_parts_are_counted_and_take_no_memory(golden):
    checkpoint = golden("qwen3-vl")
    stored = load_file(checkpoint.folder / "model.safetensors")
    of_images = sum("visual" in name for name in stored)
    model = Engine(checkpoint.folder).model
    assert dict(model.unused) == {"model.visual": of_images}
    assert model.weight_bytes == sum(
        tensor.nbytes for name, tensor in stored.items() if "visual" not in name
    )


def test_layers_that_predict_further_tokens_are_a_part(golden, tmp_path):
    """As Qwen 3.5 has them, beside the text model."""
    folder = golden("qwen3.5").folder
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "mtp.fc.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert Engine(tmp_path).model.unused["mtp"] == 1


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5", "llama4-images"])
def test_a_tensor_of_no_part_is_named_as_the_checkpoint_does(name, golden, tmp_path):
    folder = golden(name).folder
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "model.ears.x": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"ForConditionalGeneration has no tensor model\.ears\.x"):
        Engine(tmp_path)
    norm = next(x for x in stored if x.endswith("layers.1.input_layernorm.weight"))
    del stored[norm]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {norm} is missing"):
        Engine(tmp_path)


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "gemma4-images"])
def test_only_the_text_model_is_sized(name, golden):
    folder = golden(name).folder
    sized = footprint_of(folder, max_total_tokens=256)
    held = Engine(folder).model.weight_bytes
    assert abs(sized.portions[1].numbers * 4 - held) < held * 0.01


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3-vl", {"text_config": None}, r"config\.json: text_config is missing"),
        ("qwen3-vl", {"text_config": 3}, r"config\.json: text_config is 3; expected an object"),
        ("llava", {"text_config": {"model_type": "rwkv"}}, "text_config: model_type 'rwkv' is not"),
        ("llava", {"text_config": {}}, "text_config: model_type is missing"),
        ("qwen2.5-omni", {"thinker_config": {}}, "thinker_config: text_config is missing"),
    ],
)
def test_a_config_without_a_text_model_names_the_field(name, change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(golden_config(name) | change))
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def published(folder: Path, **config) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_qwen_2_5_vl_as_it_is_published(tmp_path):
    """Its fields lie beside those of the whole, and its rotation has the older name."""
    spec = read_config(
        published(
            tmp_path,
            architectures=["Qwen2_5_VLForConditionalGeneration"],
            attention_dropout=0.0,
            eos_token_id=151645,
            hidden_act="silu",
            hidden_size=3584,
            image_token_id=151655,
            initializer_range=0.02,
            intermediate_size=18944,
            max_position_embeddings=128000,
            max_window_layers=28,
            model_type="qwen2_5_vl",
            num_attention_heads=28,
            num_hidden_layers=28,
            num_key_value_heads=4,
            rms_norm_eps=1e-06,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
            rope_theta=1000000.0,
            sliding_window=32768,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            use_sliding_window=False,
            vision_config={"depth": 32, "hidden_size": 1280, "model_type": "qwen2_5_vl"},
            vocab_size=152064,
        )
    )
    assert (spec.head_counts[0], spec.kv_layouts[0].heads, spec.vocab_size) == (28, 4, 152064)
    assert spec.dtype is torch.bfloat16
    assert spec.eos_token_ids == {151645}
    assert not spec.head.tied
    rope = spec.layers[0].mixer.positions
    assert rope.inverse_frequencies[1] == pytest.approx(1e6 ** (-2 / 128))


def test_every_text_model_is_of_a_family_or_of_transformers():
    """And every nesting has some, and any of them by its type alone."""
    import transformers

    assert all(name in NATIVE or hasattr(transformers, name) for name in TEXT_MODELS.values())
    assert all({*nesting.texts} <= {*TEXT_MODELS} for nesting in NESTED.values())
