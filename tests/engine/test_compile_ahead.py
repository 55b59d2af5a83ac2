"""Kernels that are compiled while a model loads are exactly those that its steps launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from support.checkpoints.embedding_models import EmbeddingGolden
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.startup.compile_ahead import note_of

HERE = Path(__file__).parent
OPTIONS = EngineOptions(
    model_folder="",
    dtype=None,
    device="cuda",
    threads=0,
    max_batch_size=8,
    max_batch_prefill_tokens=100,
)


def answer_of(script: str, *arguments: str, cache: Path | None = None):
    """What a script beside this one prints, as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-P", str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", ()),
        ("llama", ("deterministic",)),
        ("llama", ("int4",)),
        ("gemma3-images", ()),
        ("mixtral", ()),
        ("deepseek-v2-lite", ()),
        ("qwen3-5", ()),
    ],
)
def test_launches_ask_for_the_kernels_that_were_found_without_weights(kind, how, golden):
    found, asked = answer_of("noted_launches.py", str(golden(kind).folder), *how)
    assert len(asked) > 20
    assert Counter(name for key, name in asked.items() if key not in found) == Counter()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["minilm", "qwen3"])
def test_a_model_that_makes_vectors_has_no_kernels_of_sampling(kind, tmp_path):
    found, asked = answer_of("noted_launches.py", str(EmbeddingGolden(kind, tmp_path).folder))
    assert len(asked) > 5
    assert Counter(name for key, name in asked.items() if key not in found) == Counter()
    sampling = {"prepare", "summarise", "race", "finish", "split_tops", "join_tops"}
    assert not sampling & {*asked.values()}


@pytest.mark.slow
def test_the_sums_of_all_ranks_of_a_pod_are_found_by_its_first(golden):
    folder = str(golden("llama", num_key_value_heads=4).folder)
    found = answer_of("noted_sums.py", folder, "2")
    ranks = {name: {rank for each, rank in found if each == name} for name, _ in found}
    assert ranks["_sum_over_ranks"] == ranks["_tell"] == ranks["multiply_add"] == {0, 1}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "quantize", [(), pytest.param(("int4",), marks=pytest.mark.slow)], ids=["bf16", "int4"]
)
def test_nothing_is_left_to_compile_for_a_start_and_for_steps(quantize, golden, tmp_path):
    told = answer_of(
        "late_kernels.py",
        str(golden("llama", max_position_embeddings=2048).folder),
        *quantize,
        cache=tmp_path,
    )
    assert told["ahead"] > 20
    assert told["start"] == []
    assert told["serving"] == []


def test_a_note_is_of_what_kernels_depend_on(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    options = msgspec.structs.replace(OPTIONS, model_folder=str(model))
    note = note_of(options, (9, 0), tmp_path)
    assert note.parent == tmp_path
    threads = msgspec.structs.replace(options, threads=3, questions_fd=7)
    assert note_of(threads, (9, 0), tmp_path) == note
    assert note_of(options, (8, 0), tmp_path) != note
    more = msgspec.structs.replace(options, max_batch_size=9)
    assert note_of(more, (9, 0), tmp_path) != note
    (model / "config.json").write_text('{"hidden_size": 8}')
    assert note_of(options, (9, 0), tmp_path) != note


@pytest.mark.slow
def test_the_command_fills_the_cache_once(golden, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-P", "-m", "tokenpod", "compile", "--architecture", "9.0"]
    command += ["--model-id", str(golden("llama").folder), "--max-batch-size", "4"]
    first, second = (
        subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    kernels, compiled = re.findall(r"(\d+) (?:kernels|of them)", first.stdout)
    assert kernels == compiled
    assert len(list(tmp_path.glob("*/*.cubin"))) == int(kernels) > 20
    assert re.findall(r"(\d+) (?:kernels|of them)", second.stdout) == [kernels, "0"]
    folder = str(golden("llama").folder)
    there, lacking = answer_of("launch_programs.py", folder, "4", cache=tmp_path)
    assert "cuda_utils" in there
    assert lacking == []


@pytest.mark.slow
def test_the_command_wants_an_architecture():
    command = [sys.executable, "-P", "-m", "tokenpod", "compile", "--architecture", "hopper"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--architecture" in done.stderr
