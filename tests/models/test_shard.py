"""Which part of a model is whose, and which models can't be divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenpod.models import load as loading
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_config
from tokenpod.models.layers.positions import Alibi
from tokenpod.models.load import load_model
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division

SMALL_PARTS = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_size": 96,
    "head_dim": 8,
}


@pytest.fixture
def config(golden):
    """12 query heads of 8 in 4 groups, 112 features, 96 tokens."""
    return read_config(golden("llama", **SMALL_PARTS).folder)


def parts(axis, world):
    return [Shard(rank, world).part(axis) for rank in range(world)]


def changed(spec: ModelSpec, **attention) -> ModelSpec:
    """The same with other attention."""
    layers = [replace(x, mixer=replace(x.mixer, **attention)) for x in spec.layers]
    return replace(spec, layers=tuple(layers))


def with_width(spec: ModelSpec, width: int) -> ModelSpec:
    """The same with feed-forward blocks of another width."""
    layers = [replace(layer, mlp=replace(layer.mlp, width=width)) for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


QUERIES, KEYS = Axis(96, Division.EVEN, unit=8), Axis(32, Division.KEY, unit=8)


def test_a_single_rank_has_all(config):
    assert config.on_rank(Shard()) == config
    assert parts(QUERIES, 1) == [range(96)]


def test_heads_and_features_are_divided_evenly(config):
    assert parts(QUERIES, 2) == [range(48), range(48, 96)]
    assert parts(KEYS, 2) == [range(16), range(16, 32)]
    assert parts(Axis(112), 2) == [range(112), range(112)]
    local = config.on_rank(Shard(1, 2))
    assert (local.head_counts[0], local.kv_layouts[0].heads, local.widest) == (6, 2, 56)
    assert local.vocab_size == config.vocab_size


def test_ranks_have_the_key_head_that_their_query_heads_read(config):
    few = Axis(16, Division.KEY, unit=8)
    assert parts(few, 4) == [range(8), range(8), range(8, 16), range(8, 16)]
    assert changed(config, kv_heads=2).on_rank(Shard(3, 4)).kv_layouts[0].heads == 1


def test_ranks_have_the_slopes_of_their_heads(config):
    sloped = changed(config, positions=Alibi(tuple(range(12))))
    assert sloped.on_rank(Shard(1, 4)).layers[0].mixer.positions == Alibi((3, 4, 5))


@pytest.mark.parametrize(
    ("tokens", "world", "lengths"),
    [(96, 4, [24, 24, 24, 24]), (97, 4, [25, 25, 25, 22]), (9, 4, [3, 3, 3, 0])],
)
def test_a_vocabulary_is_cut_into_blocks_of_one_length(tokens, world, lengths):
    axis = Axis(tokens, Division.VOCABULARY)
    cut = parts(axis, world)
    assert [len(part) for part in cut] == lengths
    assert [token for part in cut for token in part] == list(range(tokens))
    assert {Shard(rank, world).length(axis) for rank in range(world)} == {lengths[0]}


@pytest.mark.parametrize(
    ("family", "settings", "world", "message"),
    [
        ("llama", SMALL_PARTS, 5, "12 query heads can't be divided among 5 ranks"),
        ("llama", {"intermediate_size": 54}, 4, "54 features of a feed-forward block can't be"),
        ("qwen3-moe", {"moe_intermediate_size": 33}, 2, "33 features of an expert can't be"),
        (
            "llama",
            {**SMALL_PARTS, "intermediate_size": 120},
            6,
            "4 key/value heads can't be divided among 6 ranks, nor 6 ranks among them",
        ),
    ],
)
def test_a_world_that_does_not_fit_is_refused_before_weights_are_read(
    family, settings, world, message, golden
):
    folder = golden(family, **settings).folder
    heard = []
    with pytest.raises(ModelError, match=message) as caught:
        load_model(
            folder,
            dtype=None,
            device=torch.device("cpu"),
            progress=lambda done, total: heard.append(done),
            shard=Shard(0, world),
            group=Alone(0, world),
        )
    assert "\n" not in str(caught.value)
    assert heard == []


def test_the_refusal_says_what_would_fit(golden):
    config = read_config(golden("llama", **SMALL_PARTS).folder)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM here runs on 1, 2 or 4 ranks$"):
        config.check(3)
    with pytest.raises(ModelError, match=r"runs on 1 rank only$"):
        with_width(config, 113).check(2)


def test_a_dense_width_that_no_layer_has_need_not_divide(golden):
    config = read_config(golden("qwen3-moe", intermediate_size=113).folder)
    config.check(4)
    with pytest.raises(ModelError, match="113 features of an expert"):
        with_width(config, 113).check(4)


def test_ranks_of_one_host_need_memory_for_all_of_them(golden, monkeypatch):
    folder = golden("llama", **SMALL_PARTS).folder

    def load(local_ranks):
        return load_model(
            folder,
            dtype=None,
            device=torch.device("cpu"),
            progress=lambda done, total: None,
            shard=Shard(1, 2),
            group=Alone(1, 2, local_ranks),
        )

    part = load(1).weight_bytes
    monkeypatch.setattr(loading, "available_bytes", lambda device: 2 * part - 1)
    load(1)
    with pytest.raises(ModelError, match="GB for each of 2 ranks as float32"):
        load(2)


class Alone:
    """A group that nobody has joined yet."""

    def __init__(self, rank: int, world: int, local_ranks: int = 1) -> None:
        self.rank, self.world, self.local_ranks = rank, world, local_ranks
