"""A spec that can't be is refused where it is made, by the name of what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.families.alibi import alibi_of
from tokenpod.models.folder import read_config
from tokenpod.models.layers.attention import Attention
from tokenpod.models.layers.head_steps import NormOver
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.positions import Alibi, Rope
from tokenpod.models.layers.rope import head_order, pair_frequencies
from tokenpod.models.specs.layer_spec import SAME
from tokenpod.models.specs.spec import Head
from tokenpod.models.weights.shard import Shard


@pytest.fixture
def layer(golden):
    return read_config(golden("llama").folder).layers[0]


def test_the_first_layers_that_have_one_of_each_kind(golden):
    spec = read_config(golden("llama").folder)
    layer = spec.layers[0]
    assert isinstance(layer.mixer, Attention)
    other = replace(layer, mixer=replace(layer.mixer, window=8))
    found = [(layer,), (layer, layer), (layer, layer, other, layer, other)]
    counts = [replace(spec, layers=layers).layers_of_all_kinds for layers in found]
    assert counts == [1, 1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "attention.heads is 4: they can't share 3"),
        ({"head_dim": 15}, "attention.head_dim is 15"),
        ({"positions": Alibi((1.0,))}, "attention.positions has 1 slopes for 4 heads"),
        (
            {"qk_norm": Norm("layer", 1e-5), "qk_norm_over": NormOver.ALL},
            "attention.qk_norm.kind is 'layer'; supported over all heads: rms",
        ),
        (
            {"qk_norm": Norm("layer", 1e-5, bias=True), "qk_norm_over": NormOver.HEADS},
            "attention.qk_norm over heads has a weight, and no bias",
        ),
    ],
)
def test_attention_that_can_not_be(layer, changes, message):
    with pytest.raises(ModelError, match=message):
        replace(layer.mixer, **changes)


def test_an_unknown_norm():
    with pytest.raises(ModelError, match=r"norm\.kind is 'batch'; supported: rms, layer"):
        Norm("batch", 1e-5)
    with pytest.raises(ModelError, match=r"norm\.kind is 'rms': it has a weight, and no bias"):
        Norm("rms", 1e-5, bias=True)


def test_a_tied_head_has_no_rows_of_its_own():
    with pytest.raises(ModelError, match=r"head\.normalised: the head has a weight of its own"):
        Head(tied=True, normalised=True)


def test_norms_that_do_not_go_with_the_join(layer, golden):
    with pytest.raises(ModelError, match=r"norms\.mlp_in is SAME, and join sequential"):
        replace(layer, norms=replace(layer.norms, mlp_in=SAME))
    experts = read_config(golden("mixtral").folder).layers[0]
    with pytest.raises(ModelError, match=r"norms\.mlp_in: a mixture of experts has a norm"):
        replace(experts, norms=replace(experts.norms, mlp_in=None))


def test_layers_of_different_heads(golden, layer):
    spec = read_config(golden("llama").folder)
    other = replace(layer, mixer=replace(layer.mixer, kv_heads=2))
    spec = replace(spec, layers=(layer, other))
    assert [layout.heads for layout in spec.kv_layouts] == [4, 2]
    assert [layout.heads for layout in spec.on_rank(Shard(0, 2)).kv_layouts] == [2, 1]
    assert spec.problem(4) is None


@pytest.mark.parametrize(
    ("rotated", "interleaved", "order"),
    [
        (8, False, None),
        (4, False, (0, 1, 4, 5, 2, 3, 6, 7)),
        (8, True, (0, 2, 4, 6, 1, 3, 5, 7)),
        (4, True, (0, 2, 4, 5, 1, 3, 6, 7)),
    ],
)
def test_rows_of_a_head_are_ordered_so_that_pairs_lie_half_a_head_apart(
    rotated, interleaved, order
):
    rope = Rope((1.0,) * (rotated // 2), interleaved=interleaved)
    assert head_order(rope, 8) == order
    assert pair_frequencies(rope, 8).tolist() == [1.0] * (rotated // 2) + [0.0] * (4 - rotated // 2)


def test_slopes_of_heads_between_powers_of_two_are_those_of_a_finer_series():
    assert alibi_of(2).slopes == (2**-4, 2**-8)
    assert alibi_of(3).slopes == (2**-4, 2**-8, 2**-2)
    assert alibi_of(4, 0.5).slopes == (2**-3, 2**-5, 2**-7, 2**-9)
    assert alibi_of(2, most=4).slopes == (2**-2, 2**-4)
