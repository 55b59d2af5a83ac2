"""SHA256SUMS: files are what they say, or the model is not loaded."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from tokenpod.core.manifest import digest_of, write_manifest
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.verify import verified
from tokenpod.models.load import load_model


@pytest.fixture
def folder(golden, tmp_path):
    """A model with a manifest."""
    copy = tmp_path / "model"
    shutil.copytree(golden("llama").folder, copy)
    write_manifest(copy, {path.name: digest_of(path) for path in copy.iterdir()})
    return copy


def load(folder, **more):
    return load_model(
        folder, dtype=None, device=torch.device("cpu"), progress=lambda done, total: None, **more
    )


@pytest.mark.pod
def test_it_is_the_format_of_sha256sum(folder):
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_a_model_whose_files_have_their_digests_is_loaded(folder):
    assert load(folder, require_manifest=True).parameters_count


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json"])
def test_a_changed_file_is_named_with_both_digests(folder, name):
    before = digest_of(folder / name)
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1 if name == "model.safetensors" else 0
    (folder / name).write_bytes(data + (b"" if name == "model.safetensors" else b" "))
    with pytest.raises(ModelError, match=r"^[^\n]+$") as caught:
        load(folder)
    now = digest_of(folder / name)
    said = f"{folder / name}: its SHA-256 is {now}, and SHA256SUMS says {before}"
    assert str(caught.value) == said


def test_a_file_that_is_not_listed_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: SHA256SUMS does not list it"):
        load(folder)


def test_files_that_are_not_read_need_no_digest(folder):
    (folder / "README.md").write_text("hello")
    assert load(folder).parameters_count


def test_a_missing_manifest_is_refused_only_if_it_is_required(folder):
    (folder / "SHA256SUMS").unlink()
    assert load(folder).parameters_count
    with pytest.raises(ModelError, match=r"has no SHA256SUMS, and --require-manifest is set$"):
        load(folder, require_manifest=True)


@pytest.mark.parametrize("text", [b"hello\n", b"\xff\n", b"0" * 64 + b" model.safetensors\n"])
def test_what_is_no_manifest_is_named(folder, text):
    (folder / "SHA256SUMS").write_bytes(text)
    with pytest.raises(ModelError, match=r"SHA256SUMS: (line 1 is not a digest and a|not UTF-8)"):
        load(folder)


def test_ranks_of_a_host_divide_the_files(folder):
    weights = [folder / "model.safetensors"]
    names = ["model.safetensors", *sorted(p.name for p in folder.glob("*.json"))]
    for position, name in enumerate(names):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole + b" ")
        for rank in range(2):
            if rank == position % 2:
                with (
                    pytest.raises(ModelError, match=name),
                    verified(folder, weights, required=False, share=(rank, 2)),
                ):
                    pass
            else:
                with verified(folder, weights, required=False, share=(rank, 2)):
                    pass
        (folder / name).write_bytes(whole)
