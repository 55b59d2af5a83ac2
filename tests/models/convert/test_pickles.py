"""`.bin` checkpoints: whole, old, in several files; and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from support.checkpoints import medusa_heads
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.medusa import open_medusa, read_medusa


@pytest.fixture
def stored(golden):
    """A checkpoint's tensors."""
    return load_file(golden("llama").folder / "model.safetensors")


@pytest.fixture
def folder(golden, tmp_path):
    """The checkpoint's folder without weights."""
    copy = tmp_path / "pickled"
    shutil.copytree(golden("llama").folder, copy)
    (copy / "model.safetensors").unlink()
    return copy


def holds(folder, stored):
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.names == stored.keys()
        assert all(torch.equal(checkpoint.read(name), stored[name]) for name in stored)
    return True


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.pod
def test_a_checkpoint_becomes_safetensors(folder, stored, convert_to, zipped):
    torch.save(stored, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    made = convert_to(folder)
    assert holds(made, stored)
    assert (made / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert {p.name for p in made.iterdir()} >= {"SHA256SUMS", "model.safetensors"}


@pytest.mark.pod
def test_several_files_become_several(folder, stored, convert_to):
    names = list(stored)
    where = {n: f"pytorch_model-{i % 3 + 1:05d}-of-00003.bin" for i, n in enumerate(names)}
    for file in set(where.values()):
        torch.save({n: stored[n] for n in names if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    made = convert_to(folder, shard_bytes=60_000)
    assert holds(made, stored)
    files = sorted(made.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"


@pytest.mark.pod
def test_numbers_take_another_type_and_config_says_so(folder, stored, convert_to):
    stored["model.layers.0.self_attn.q_proj.weight"] = stored[
        "model.layers.0.self_attn.q_proj.weight"
    ].t()
    torch.save({"state_dict": stored}, folder / "pytorch_model.bin")
    made = convert_to(folder, dtype="bfloat16")
    assert holds(made, {name: tensor.bfloat16() for name, tensor in stored.items()})
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.pod
def test_medusa_heads_become_safetensors(tmp_path, convert_to):
    folder, made = tmp_path / "heads", medusa_heads.tensors(width=8, vocabulary=12)
    medusa_heads.save(folder, made)
    (folder / medusa_heads.FILE).unlink()
    torch.save(made, folder / "medusa_lm_head.pt")
    converted = convert_to(folder)
    assert holds(converted, made)
    with open_medusa(converted) as checkpoint:
        assert read_medusa(converted, checkpoint).heads == medusa_heads.HEADS


class Attack:
    """Runs a command where a pickle is trusted."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def test_a_pickle_that_runs_code_is_refused(folder, convert_to, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Attack(tmp_path / "run")}, 2))
    with pytest.raises(ModelError, match=r"^[^\n]*: it asks for posix\.system; only tensors"):
        convert_to(folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"x": [1]}, "'x' is a list, not a tensor under a name"),
        ([torch.zeros(1)], "it holds a list, not tensors by name"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "x is not a dense tensor"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "x is torch.complex64, which safetensors"),
    ],
)
def test_what_is_no_state_of_a_model_is_named(folder, convert_to, state, said):
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"^[^\n]+$") as caught:
        convert_to(folder)
    assert said in str(caught.value)


@pytest.mark.parametrize("kept", [0, 10, 5_000])
def test_a_part_of_a_file_is_refused(folder, stored, convert_to, kept):
    torch.save(stored, folder / "pytorch_model.bin")
    os.truncate(folder / "pytorch_model.bin", kept)
    with pytest.raises(ModelError, match=r"^[^\n]*(not a whole|no) checkpoint of PyTorch"):
        convert_to(folder)


def test_a_folder_that_is_no_model_is_refused(folder, stored, tmp_path, convert_to):
    with pytest.raises(ModelError, match=r"is no model: it has no weights"):
        convert_to(folder)
    (tmp_path / "made").rmdir()
    torch.save(stored, folder / "pytorch_model.bin")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"is no model: it has no config\.json"):
        convert_to(folder)


def test_a_full_disk_is_named(folder, stored, convert_to):
    torch.save(stored, folder / "pytorch_model.bin")
    here = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, here[1]))
    try:
        with pytest.raises(ModelError, match=r"no room is left for the result \(File too large\)"):
            convert_to(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, here)


def test_a_limit_on_memory_that_is_too_low_is_named(folder, stored, convert_to, monkeypatch):
    torch.save(stored, folder / "pytorch_model.bin")

    def fail(*arguments, **more):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(ModelError, match=r"takes more than 9,000 bytes \(--memory-limit\)$"):
        convert_to(folder, memory=9000)
