"""Reading weights: merged, cast, and divided among ranks."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.folder import read_layout
from tokenpod.models.layers.reading import read_source, read_weights
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division, Segment, Source


def read(folder, rank=0, world=1, dtype=torch.float32):
    with Checkpoint(folder) as checkpoint:
        weights = read_layout(folder, checkpoint).weights
        return weights, read_weights(
            checkpoint,
            weights,
            dtype=dtype,
            device=torch.device("cpu"),
            progress=lambda done, total: None,
            shard=Shard(rank, world),
        )


def test_queries_keys_and_values_are_stacked(golden):
    folder = golden("llama-biases").folder
    stored = load_file(folder / "model.safetensors")
    _, loaded = read(folder)
    for kind, name in (("weight", "1.qkv"), ("bias", "1.qkv_bias")):
        parts = [stored[f"model.layers.1.self_attn.{x}_proj.{kind}"] for x in "qkv"]
        assert torch.equal(loaded[name], torch.cat(parts))


def test_experts_are_stacked_with_gate_and_up_of_each_together(golden):
    folder = golden("mixtral").folder
    stored = load_file(folder / "model.safetensors")
    _, loaded = read(folder)
    block = "model.layers.2.block_sparse_moe"
    assert torch.equal(loaded["2.experts.router"], stored[f"{block}.gate.weight"])
    assert loaded["2.experts.gate_up"].shape == (5, 2 * 112, 64)
    assert loaded["2.experts.down"].shape == (5, 64, 112)
    for expert in range(5):
        gate, down, up = (stored[f"{block}.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
        assert torch.equal(loaded["2.experts.gate_up"][expert], torch.cat([gate, up]))
        assert torch.equal(loaded["2.experts.down"][expert], down)


def test_layers_have_experts_or_a_dense_block(golden):
    _, loaded = read(golden("qwen3-moe-some-dense").folder)
    assert [f"{i}.experts.router" in loaded for i in range(5)] == [0, 0, 0, 1, 0]
    assert [f"{i}.up" in loaded for i in range(5)] == [1, 1, 1, 0, 1]


def test_ranks_share_out_the_features_of_every_expert(golden):
    folder = golden("qwen3-moe").folder
    _, whole = read(folder)
    first, second = (read(folder, rank, 2)[1] for rank in range(2))
    name = "1.experts.gate_up"
    halves = [part[name].chunk(2, dim=1) for part in (first, second)]
    joined = torch.cat([part for pair in zip(*halves, strict=True) for part in pair], dim=1)
    assert torch.equal(joined, whole[name])
    name = "1.experts.down"
    assert torch.equal(torch.cat([first[name], second[name]], dim=2), whole[name])
    name = "1.experts.router"
    assert torch.equal(first[name], whole[name])


def test_weights_do_not_change_with_the_file(golden, tmp_path):
    path = golden("llama").folder / "model.safetensors"
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_bytes((path.parent / "config.json").read_bytes())
    _, loaded = read(tmp_path)
    before = {name: weight.clone() for name, weight in loaded.items()}
    with copy.open("r+b") as file:
        file.write(b"\xff" * copy.stat().st_size)
    assert all(torch.equal(before[name], weight) for name, weight in loaded.items())


def test_the_parts_of_all_ranks_make_the_whole(golden):
    """Stacked parts hold each rank's shard of every source, so products stay aligned."""
    folder = golden("llama").folder
    weights, whole = read(folder)
    parts = [read(folder, rank, 2)[1] for rank in range(2)]
    for weight in weights:
        ours = [part[weight.name] for part in parts]
        axis = weight.sources[0].divided
        if axis is None:
            assert all(torch.equal(part, whole[weight.name]) for part in ours)
            continue
        if axis == 1:
            assert torch.equal(torch.cat(ours, dim=1), whole[weight.name])
            continue
        halves = [part.chunk(len(weight.sources)) for part in ours]
        if weight.name.endswith(("qkv", "up", "head")):
            joined = torch.cat([half for pair in zip(*halves, strict=True) for half in pair])
            assert torch.equal(joined, whole[weight.name])


def test_parts_of_a_fused_tensor_are_found_by_heads_or_in_order(tmp_path):
    """Two key/value heads of 3 numbers, each with two query heads."""
    rows = torch.arange(2 * 4 * 3).float()
    save_file({"fused": torch.stack([rows, -rows], dim=1)}, tmp_path / "model.safetensors")
    by_heads = {"sizes": (6, 3, 3), "groups": 2}
    queries, keys = (12, Division.EVEN, 3), (6, Division.KEY, 3)
    for index, axis, whole, second in (
        (0, queries, [*range(6), *range(12, 18)], range(12, 18)),
        (1, keys, [6, 7, 8, 18, 19, 20], [18, 19, 20]),
        (2, keys, [9, 10, 11, 21, 22, 23], [21, 22, 23]),
    ):
        source = Source("fused", (Axis(*axis), Axis(2)), Segment(index=index, **by_heads))
        assert source.stored_shape == (24, 2)
        assert rows_read(tmp_path, source) == list(whole)
        assert rows_read(tmp_path, source, Shard(1, 2)) == list(second)
    in_order = Source("fused", (Axis(6, Division.KEY, 3), Axis(2)), Segment((12, 6, 6), 1))
    assert rows_read(tmp_path, in_order, Shard(1, 2)) == [15, 16, 17]


def test_rows_of_heads_are_held_in_another_order(tmp_path):
    save_file({"q": torch.arange(8.0)[:, None]}, tmp_path / "model.safetensors")
    source = Source("q", (Axis(8, Division.EVEN, 4), Axis(1)), order=(0, 2, 1, 3))
    assert rows_read(tmp_path, source) == [0, 2, 1, 3, 4, 6, 5, 7]
    assert rows_read(tmp_path, source, Shard(1, 2)) == [4, 6, 5, 7]


def test_a_transposed_tensor_is_turned_and_its_inputs_are_divided(tmp_path):
    stored = torch.arange(12.0).view(4, 3)  # [in, out]
    save_file({"w": stored}, tmp_path / "model.safetensors")
    source = Source("w", (Axis(3), Axis(4, Division.EVEN)), transposed=True)
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(read_source(checkpoint, source, Shard()), stored.t())
        half = read_source(checkpoint, source, Shard(1, 2))
    assert torch.equal(half, stored[2:].t())


def test_a_function_makes_a_weight_of_what_is_stored(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    source = Source("w", (Axis(3),), function=lambda stored: stored * 2)
    with Checkpoint(tmp_path) as checkpoint:
        assert read_source(checkpoint, source, Shard()).tolist() == [2, 2, 2]


def rows_read(folder, source, shard=Shard()):  # noqa: B008 - it is frozen
    """The first column, which tells the rows apart."""
    with Checkpoint(folder) as checkpoint:
        return read_source(checkpoint, source, shard)[:, 0].tolist()
