"""Weights of 16 bits of a model that a CPU computes in float32: as stored, and nothing is lost."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenpod.kernels.products import compiled_tiles
from tokenpod.models.adapters.store import Space
from tokenpod.models.footprint import footprint_of
from tokenpod.models.load import load_model

pytestmark = pytest.mark.skipif(
    not compiled_tiles.available(), reason="this processor multiplies no such weights"
)

CPU = torch.device("cpu")


def load(folder, **more):
    return load_model(
        folder, dtype=torch.float32, device=CPU, progress=lambda done, total: None, **more
    )


@pytest.fixture
def both(golden, tmp_path):
    """A kind's checkpoint in numbers of 16 bits, and the same numbers as float32."""

    def make(name, dtype=torch.bfloat16):
        folder, stored = golden(name).folder, load_file(golden(name).folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        narrow = {key: tensor.to(dtype) for key, tensor in stored.items()}
        made = []
        for kind in (dtype, torch.float32):
            made.append(tmp_path / str(kind))
            shutil.copytree(folder, made[-1])
            tensors = {key: tensor.to(kind) for key, tensor in narrow.items()}
            save_file(tensors, made[-1] / "model.safetensors")
            told = {"dtype": str(kind).removeprefix("torch.")}
            (made[-1] / "config.json").write_text(json.dumps({**config, **told}))
        return made

    return make


def logprobs(model, schedule, tokens):
    scheduler = schedule(model)
    sequence = scheduler.sequence(tokens)
    return torch.cat([scheduler.step([(sequence, n)])[0] for n in (12, 1, 7, 1)])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("llama", torch.float16, marks=pytest.mark.slow),
        ("llama-biases", torch.bfloat16),
        ("gemma2", torch.bfloat16),
        ("mixtral", torch.bfloat16),
        ("gemma4", torch.bfloat16),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_same_numbers_in_float32(name, dtype, both, schedule, text):
    tokens = text(21)
    narrow, wide = (load(folder) for folder in both(name, dtype))
    assert narrow.dtype == wide.dtype == torch.float32
    assert narrow.weight_bytes < 0.6 * wide.weight_bytes
    assert narrow.quantization == ""
    assert torch.equal(logprobs(narrow, schedule, tokens), logprobs(wide, schedule, tokens))


@pytest.mark.parametrize("name", ["llama", "mixtral", "opt-350m"])
def test_a_footprint_says_what_they_take(name, both):
    for folder in both(name):
        found = footprint_of(folder)
        assert found.weight_bytes(1, 4, cpu=True) == load(folder).weight_bytes
        assert found.weight_bytes(1, 4) == 4 * found.portions[1].numbers


def test_other_formats_leave_them_the_rest(both, schedule, text):
    folders = both("llama")
    narrow, wide = (load(folder, quantize="int8") for folder in folders)
    assert narrow.quantization == wide.quantization == "int8"
    saved = 2 * footprint_of(folders[0], "int8").portions[1].narrow_numbers
    assert wide.weight_bytes - narrow.weight_bytes == saved > 0
    assert torch.equal(logprobs(narrow, schedule, text(21)), logprobs(wide, schedule, text(21)))


def test_slots_for_adapters_hold_float32(both, schedule, text):
    narrow, wide = (load(folder, adapters=Space(2, 8)) for folder in both("llama"))
    assert narrow.adapters.nbytes == wide.adapters.nbytes
    assert torch.equal(logprobs(narrow, schedule, text(21)), logprobs(wide, schedule, text(21)))
