"""What a model takes, told from its configuration and from its tensors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_layout
from tokenpod.models.footprint import footprint_of
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.shard import Shard


@pytest.fixture
def folder(golden: Callable, kind: str) -> Path:
    return golden(kind).folder


@pytest.mark.sampled(4, "slow")
def test_parameters_are_those_of_the_loaded_model(folder: Path, load_folder: Callable):
    assert footprint_of(folder).parameters == load_folder(folder).parameters_count


@pytest.mark.sampled(4, "slow")
def test_config_alone_tells_the_same(folder: Path, tmp_path: Path):
    shutil.copy(folder / "config.json", tmp_path)
    alone, whole = footprint_of(tmp_path), footprint_of(folder)
    assert (alone.from_tensors, whole.from_tensors) == (False, True)
    assert alone.parameters == whole.parameters
    assert alone.portions == whole.portions


@pytest.mark.sampled(4, "slow")
def test_a_rank_alone_holds_all_weights(folder: Path, load_folder: Callable):
    model = load_folder(folder, dtype=torch.bfloat16)
    wider = [weight for weight in read_layout(folder, None).weights if weight.dtype]
    biases = ("experts.router_bias", "experts.correction", "sinks", "log_rate", "shift", "skip")
    assert all("norm" in x.sources[0].name or x.name.endswith(biases) for x in wider)
    more = 2 * Shard().numbers(wider)  # kept in float32
    assert footprint_of(folder).weight_bytes(1, 2) + more == model.weight_bytes


def test_a_rank_of_several_holds_what_its_share_is(golden: Callable):
    folder = golden("llama").folder
    footprint = footprint_of(folder)
    layout = read_layout(folder, None)
    config = layout.spec
    assert sorted(footprint.portions) == [
        world for world in config.rank_counts if not divides_badly(config, world)
    ]
    for world, portion in footprint.portions.items():
        shard = Shard(0, world)
        with Checkpoint(folder) as checkpoint:
            tensors = read_weights(
                checkpoint,
                layout.weights,
                dtype=torch.float32,
                device=torch.device("cpu"),
                progress=lambda done, total: None,
                shard=shard,
            )
        assert portion.numbers == sum(tensor.numel() for tensor in tensors.values())
        assert portion.kv_numbers == sum(kv.numbers for kv in config.on_rank(shard).kv_layouts)
        assert portion.kv_widest == max(x.numbers for x in config.on_rank(shard).kv_layouts)
        assert portion.kv_scales == sum(2 * kv.heads for kv in config.on_rank(shard).kv_layouts)


def divides_badly(config: ModelSpec, world: int) -> bool:
    try:
        config.check(world)
    except ModelError:
        return True
    return False


def test_a_head_that_is_not_there_is_the_embedding(golden: Callable, tmp_path: Path):
    shutil.copytree(golden("llama").folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    before = footprint_of(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert before.parameters - footprint_of(tmp_path).parameters == head.numel()


def test_tensors_that_are_not_the_configs_are_refused(golden: Callable, tmp_path: Path):
    shutil.copytree(golden("llama").folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    with pytest.raises(ModelError, match=r"has shape .*; config.json says \[7, "):
        footprint_of(tmp_path)


@pytest.mark.compute
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma4-experts-shared", "llama4")),
        "minicpm3",
    ],
)
def test_a_model_of_another_family_is_sized_as_it_is_loaded(
    golden: Callable, load_folder: Callable, name: str
):
    folder = golden(name).folder
    model, footprint = load_folder(folder), footprint_of(folder)
    assert footprint.parameters == model.parameters_count
    assert footprint.slot_bytes(1, "float32") == sum(x.numbers for x in model.config.kv_layouts) * 4
    assert list(footprint.portions) == [1]


def test_a_model_that_shows_its_keys_only_once_loaded_is_not_sized(golden: Callable):
    with pytest.raises(ModelError, match=r"JetMoeForCausalLM .* can't be sized before"):
        footprint_of(golden("jetmoe").folder)
