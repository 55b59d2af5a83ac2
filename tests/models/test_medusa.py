"""Medusa heads in each published layout, against the definition in torch, on random weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from support.checkpoints import medusa_heads
from support.checkpoints.demo import DEMO as FOLDER
from support.checkpoints.medusa_heads import (
    HEADS,
    VOCABULARY,
    WIDTH,
    as_vllm,
    defined,
    save,
    tensors,
    vllm_config,
)
from support.engines.demo_engine import CPU, demo_model
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_config
from tokenpod.models.footprint import footprint_of
from tokenpod.models.medusa import is_medusa, load_medusa

HIDDEN = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def served():
    return demo_model()


def loaded(folder, served, heads=HEADS):
    return load_medusa(folder, served, heads=heads, device=CPU)


def says(heads, expected, count=HEADS):
    """Whether these heads say what is expected, [count, n, vocabulary]."""
    found = heads.logits(HIDDEN, count).view(count, len(HIDDEN), -1)
    return torch.allclose(found, expected[:count], atol=1e-4)


def blocks_alone(made):
    return {name: tensor for name, tensor in made.items() if ".linear." in name}


@pytest.mark.parametrize(
    ("prefix", "file"),
    [
        ("", "medusa_lm_head.safetensors"),
        ("", "model.safetensors"),  # as `tokenpod convert` makes it
        ("medusa_head.", "model.safetensors"),
    ],
)
def test_heads_of_their_own_say_what_the_definition_says(tmp_path, served, prefix, file):
    """By the authors' names, also within a whole model's checkpoint."""
    made = {prefix + name: tensor for name, tensor in tensors().items()}
    if prefix:
        made["model.norm.weight"] = torch.ones(WIDTH)
    folder = save(tmp_path / "heads", made, file=file)
    assert is_medusa(folder)
    heads = loaded(folder, served)
    assert says(heads, defined(tensors(), HIDDEN))
    assert says(heads, defined(tensors(), HIDDEN), count=2)
    assert heads.weight_bytes == footprint_of(folder, heads=HEADS).weight_bytes(1, 4)
    assert heads.config.kv_layouts == ()


def test_blocks_alone_go_through_the_served_models_head(tmp_path, served):
    """TGI's second layout."""
    folder = save(tmp_path / "heads", blocks_alone(tensors()))
    heads = loaded(folder, served)
    own = load_file(FOLDER / "model.safetensors")
    matrix = own.get("lm_head.weight", own["model.embed_tokens.weight"]).float()
    assert says(heads, defined(tensors(), HIDDEN, matrix))


def test_fewer_heads_take_less_memory(tmp_path, served):
    folder = save(tmp_path / "heads")
    two = loaded(folder, served, heads=2)
    assert 2 * two.weight_bytes == loaded(folder, served).weight_bytes
    assert footprint_of(folder, heads=2).weight_bytes(1, 4) == two.weight_bytes
    assert says(two, defined(tensors(), HIDDEN), count=2)


def test_vllms_names_are_read(tmp_path, served):
    folder = save(tmp_path / "heads", as_vllm(tensors()), vllm_config(), "model.safetensors")
    assert is_medusa(folder)
    assert says(loaded(folder, served), defined(tensors(), HIDDEN))


def test_blocks_may_have_no_bias(tmp_path, served):
    made = {n: t for n, t in as_vllm(tensors()).items() if not n.endswith("bias")}
    fields = vllm_config(medusa_fc_bias=False)
    heads = loaded(save(tmp_path / "heads", made, fields, "model.safetensors"), served)
    w = tensors() | {name: torch.zeros(WIDTH) for name in tensors() if name.endswith("bias")}
    assert says(heads, defined(w, HIDDEN))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_product_may_serve_all_heads(tmp_path, served, name):
    matrix = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(4))
    made = as_vllm(blocks_alone(tensors())) | {name: matrix}
    fields = vllm_config(original_lm_head=True)
    heads = loaded(save(tmp_path / "heads", made, fields, "model.safetensors"), served)
    assert says(heads, defined(tensors(), HIDDEN, matrix))


@pytest.mark.parametrize("whole", [False, True], ids=["their own rows", "all rows"])
def test_heads_of_fewer_tokens_guess_no_others(tmp_path, served, whole):
    some = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(6))[:300]
    made = as_vllm(tensors())
    for i in range(0 if whole else HEADS):
        made[f"lm_heads.{i}.weight"] = made[f"lm_heads.{i}.weight"][some]
    made["token_map"] = some
    fields = vllm_config(truncated_vocab_size=300, logit_scale=0.5)
    heads = loaded(save(tmp_path / "heads", made, fields, "model.safetensors"), served)
    expected = torch.full((HEADS, len(HIDDEN), VOCABULARY), -torch.inf)
    expected[..., some] = defined(tensors(), HIDDEN)[..., some] / 2
    assert says(heads, expected)


def without(name):
    return {n: t for n, t in tensors().items() if n != name}


@pytest.mark.parametrize(
    ("made", "fields", "problem"),
    [
        (without("1.1.linear.bias"), {}, r"tensor 1\.1\.linear\.bias is missing"),
        (without("2.2.weight"), {}, r"tensor 2\.2\.weight is missing"),
        (without("0.2.weight"), {}, r"tensor 0\.2\.weight is missing"),
        (tensors() | {"4.0.linear.weight": torch.zeros(WIDTH, WIDTH)}, {}, r"no tensor 4\.0\.lin"),
        (
            tensors(vocabulary=5000),
            {},
            "has 5000 tokens, and that of the served .* 4096",
        ),
        (tensors(width=128), {}, "it reads 128 features, and the served model has 256"),
        (
            {f"heads.{n}": t for n, t in tensors().items()},
            {},
            r"\(heads\.0\.0\..*\) are in no layout of Medusa heads that is read",
        ),
        (tensors(), {"medusa_num_heads": 3}, r"Medusa has no tensor 3\.0\.linear\.bias"),
        (tensors(), {"medusa_num_heads": "four"}, "medusa_num_heads is 'four'"),
        (tensors(), {"medusa_num_heads": 1 << 20}, "whole number from 1 to 64"),
        (tensors() | {"0.0.linear.weight": torch.zeros(WIDTH, 9)}, {}, r"has shape \[256, 9\]"),
        (
            tensors(vocabulary=300) | {"token_map": torch.arange(9)},
            {},
            "token_map names 9 tokens, and 300 are scored",
        ),
        (tensors() | {"token_map": torch.full((9,), 4096)}, {}, "names tokens beyond the 4096"),
        (
            tensors() | {"token_map": torch.zeros(9)},
            {},
            "expected fewer whole numbers than",
        ),
    ],
)
def test_what_is_no_such_layout_is_refused_by_name(tmp_path, served, made, fields, problem):
    folder = save(tmp_path / "heads", made, medusa_heads.config() | fields)
    with pytest.raises(ModelError, match=problem):
        loaded(folder, served)


def test_more_drafts_than_heads_are_refused(tmp_path, served):
    with pytest.raises(ModelError, match=r"has 4 heads, .* --speculate is 5"):
        loaded(save(tmp_path / "heads"), served, heads=5)


def test_pickles_are_refused_by_name(tmp_path, served):
    folder = save(tmp_path / "heads")
    torch.save(tensors(), folder / "medusa_lm_head.pt")
    (folder / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ModelError, match=r"`tokenpod convert .*` makes them of medusa_lm_head\.pt"):
        loaded(folder, served)


def test_a_folder_of_heads_alone_says_how_it_is_served(tmp_path):
    """TGI serves it by the name of its model."""
    with pytest.raises(ModelError, match="serve their model, some/model, with --speculate and"):
        read_config(save(tmp_path / "heads"))


def test_a_model_that_has_heads_within_is_served_without_them(tmp_path):
    folder = tmp_path / "whole"
    made = load_file(FOLDER / "model.safetensors")
    made |= {f"medusa_head.{name}": tensor for name, tensor in tensors().items()}
    fields = json.loads((FOLDER / "config.json").read_text()) | medusa_heads.config()
    save(folder, made, fields, "model.safetensors")
    alone, within = footprint_of(FOLDER), footprint_of(folder)
    assert alone.parameters == within.parameters
    heads = footprint_of(folder, heads=1)
    assert heads.parameters == 2 * WIDTH * (WIDTH + 1) + WIDTH * VOCABULARY
