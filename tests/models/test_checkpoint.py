"""Reading weights: merged, cast, and divided among ranks."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tokenpod.models.checkpoint import Checkpoint, read_weights
from tokenpod.models.families import FAMILIES
from tokenpod.models.load import read_config
from tokenpod.models.share import Share
from tokenpod.models.weights import Split, expand


def read(folder, rank=0, world=1, dtype=torch.float32):
    config = read_config(folder)
    (family,) = (f for f in FAMILIES if config.architecture in f.architectures)
    weights = expand(family.weights(config), config.layers)
    with Checkpoint(folder) as checkpoint:
        return weights, read_weights(
            checkpoint,
            weights,
            config,
            dtype=dtype,
            device=torch.device("cpu"),
            progress=lambda done, total: None,
            share=Share(rank, world),
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
    assert [f"{i}.gate_up" in loaded for i in range(5)] == [1, 1, 1, 0, 1]


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
    """Stacked parts hold each rank's share of every source, so products stay aligned."""
    folder = golden("llama").folder
    weights, whole = read(folder)
    parts = [read(folder, rank, 2)[1] for rank in range(2)]
    for weight in weights:
        ours = [part[weight.name] for part in parts]
        if weight.split is Split.WHOLE:
            assert all(torch.equal(part, whole[weight.name]) for part in ours)
            continue
        if weight.split is Split.INPUT:
            assert torch.equal(torch.cat(ours, dim=1), whole[weight.name])
            continue
        halves = [part.chunk(len(weight.sources)) for part in ours]
        if weight.name.endswith(("qkv", "gate_up", "head")):
            joined = torch.cat([half for pair in zip(*halves, strict=True) for half in pair])
            assert torch.equal(joined, whole[weight.name])
