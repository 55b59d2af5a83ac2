"""Weights of fewer bits, made while loading: the model says what one of their float values says."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenpod.kernels.operations.weight import LinearWeight, StackedWeight
from tokenpod.kernels.products.formats import MADE_AT_LOAD
from tokenpod.models import load as loading
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_layout
from tokenpod.models.footprint import footprint_of
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import Shard

CPU = torch.device("cpu")
KINDS = ["llama-biases", "qwen3", "opt-350m", "gpt-neox", "gemma2", "falcon-40b", "phi3"]


def load(folder, **more):
    return load_model(folder, dtype=None, device=CPU, progress=lambda done, total: None, **more)


def read(folder, shard=Shard(), quantize="int8"):  # noqa: B008 - it is frozen
    with Checkpoint(folder) as checkpoint:
        layout = read_layout(folder, checkpoint, quantize=quantize)
        return read_weights(
            checkpoint,
            layout.weights,
            dtype=torch.float32,
            device=CPU,
            progress=lambda done, total: None,
            shard=shard,
            reader=layout.reader,
        )


@pytest.fixture
def rounded(golden, tmp_path):
    """A checkpoint of what a kind's weights of fewer bits stand for."""

    def make(name, quantize):
        folder = golden(name).folder
        stored = load_file(folder / "model.safetensors")
        layers = re.compile(r"\.(layers|h)\.\d+\..*\.weight$")
        for key, tensor in stored.items():
            if layers.search(key) and tensor.ndim == 2 and not key.endswith(".gate.weight"):
                stored[key] = MADE_AT_LOAD[quantize].made_of(tensor).dequantised(torch.float32)
        save_file(stored, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("quantize", "name"),
    [("int8", name) for name in (*KINDS, "mixtral")]
    + [("int4", name) for name in ("llama-biases", "falcon-40b", "mixtral")],
)
def test_logprobs_are_those_of_the_rounded_weights(
    quantize, name, golden, rounded, schedule, text
):  # fmt: skip
    tokens = text(21)
    results = []
    for model in (load(golden(name).folder, quantize=quantize), load(rounded(name, quantize))):
        scheduler = schedule(model)
        sequence = scheduler.sequence(tokens)
        results.append(torch.cat([scheduler.step([(sequence, n)])[0] for n in (12, 1, 7, 1)]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)


def test_products_take_a_byte_per_number_and_the_rest_what_it_took(golden):
    folder = golden("llama").folder
    dense, small = load(folder), load(folder, quantize="int8")
    assert small.parameters_count == dense.parameters_count
    layout = read_layout(folder, None)
    multiplied = [weight.shape for weight in layout.weights if weight.multiplied]
    saved = sum(3 * n * k - 4 * n for n, k in multiplied)
    assert dense.weight_bytes - small.weight_bytes == saved
    assert small.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama-biases", "falcon-40b"])
def test_ranks_have_parts_of_the_same_numbers(name, golden):
    folder = golden(name).folder
    whole, parts = read(folder), [read(folder, Shard(rank, 2)) for rank in range(2)]
    (down,) = whole["1.down"].parts
    halves = [part["1.down"].parts[0] for part in parts]
    assert torch.equal(torch.cat([half.numbers for half in halves], dim=1), down.numbers)
    assert all(torch.equal(half.scale, down.scale) for half in halves)
    (up,) = whole["1.up"].parts
    assert sum(len(part["1.up"].parts[0].scale) for part in parts) == len(up.scale)
    dense = [name for name, weight in whole.items() if not isinstance(weight, LinearWeight)]
    assert not [name for name in dense if name.endswith(("qkv", "output", "up", "down"))]
    assert {"embedding", "head"} <= set(dense) | {"head"}


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("mixtral", "int8"),
        ("gpt-oss", "int8"),
        ("gpt-oss", "fp8"),
        ("gpt-oss", "int4"),
        ("gpt-oss-mxfp4", None),
    ],
)
def test_ranks_have_parts_of_the_same_experts(name, quantize, golden):
    folder = golden(name).folder
    whole, *parts = (read(folder, shard, quantize) for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    for key in ("1.experts.gate_up", "1.experts.down"):
        assert all(isinstance(weights[key], StackedWeight) for weights in (whole, *parts))
        made, *halves = (weights[key].dequantised(torch.float32) for weights in (whole, *parts))
        if key.endswith("down"):
            assert torch.equal(torch.cat(halves, dim=2), made)
        else:
            halves = [half.unflatten(1, (2, -1)) for half in halves]
            assert torch.equal(torch.cat(halves, dim=2).flatten(1, 2), made)


def test_experts_packed_by_their_publisher_stay_so_and_nothing_else_is_made(golden):
    folder = golden("gpt-oss-mxfp4").folder
    model, found = load(folder), footprint_of(folder)
    assert model.quantization == "mxfp4"
    assert abs(found.weight_bytes(1, 4) / model.weight_bytes - 1) < 0.01
    assert model.weight_bytes < 0.6 * 4 * model.parameters_count
    assert load(folder, quantize="mxfp4").weight_bytes == model.weight_bytes
    with pytest.raises(ModelError, match=r"quantize is int8: .* says mxfp4"):
        load(folder, quantize="int8")


def test_an_unknown_format_is_refused(golden):
    with pytest.raises(ModelError, match="quantize is 'int3'; supported: int8, fp8, int4"):
        load(golden("llama").folder, quantize="int3")


def test_memory_is_asked_for_what_is_held(golden, monkeypatch):
    folder = golden("llama").folder
    held = load(folder, quantize="int8").weight_bytes
    monkeypatch.setattr(loading, "available_bytes", lambda device: held)
    load(folder, quantize="int8")
    with pytest.raises(ModelError, match="the weights need"):
        load(folder)


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt-350m"])
def test_the_head_is_made_so_too_where_that_is_asked_for(name, golden, schedule, text):
    """Of its own tensor, or of the embedding's, which stays as it is."""
    folder = golden(name).folder
    plain, small = (load(folder, quantize="int8", quantize_head=head) for head in (False, True))
    layout = read_layout(folder, None, quantize="int8", quantize_head=True)
    head = next(weight for weight in layout.weights if weight.name == "head")
    rows, columns = head.shape
    added = rows * (columns + 4) - (0 if layout.spec.head.tied else 4 * rows * columns)
    assert small.weight_bytes - plain.weight_bytes == added
    assert small.parameters_count == plain.parameters_count
    found = footprint_of(folder, "int8", head=True)
    assert found.weight_bytes(1, 4) == small.weight_bytes
    assert found.parameters == small.parameters_count
    tokens, logprobs = text(21), []
    for model in (plain, small):
        scheduler = schedule(model)
        logprobs.append(scheduler.step([(scheduler.sequence(tokens), 21)])[0])
    assert not torch.equal(*logprobs)
    torch.testing.assert_close(*logprobs, rtol=0, atol=0.15)


def test_a_head_is_read_by_ranks_in_parts_of_the_same_numbers(golden):
    folder = golden("gemma2").folder
    parts = []
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        with Checkpoint(folder) as checkpoint:
            layout = read_layout(folder, checkpoint, quantize="int4", quantize_head=True)
            weights = read_weights(
                checkpoint,
                [weight for weight in layout.weights if weight.name == "head"],
                dtype=torch.float32,
                device=CPU,
                progress=lambda done, total: None,
                shard=shard,
                reader=layout.reader,
            )
        parts.append(weights["head"].parts[0].dequantised(torch.float32))
    assert torch.equal(torch.cat(parts[1:])[: len(parts[0])], parts[0])
