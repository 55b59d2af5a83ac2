"""`tokenpod convert`, as a command: its process, and what is left of a failure."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tokenpod.commands import convert as command
from tokenpod_client.cli.app import main

pytestmark = pytest.mark.pod

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture
def source(tmp_path):
    """The embedded model as a pickle."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    torch.save(load_file(DEMO / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


def test_a_checkpoint_is_converted_by_a_process(source, tmp_path, capfd):
    assert main(["convert", str(source), str(tmp_path / "made")]) == 0
    said = capfd.readouterr()
    assert "tensors, " in said.out
    assert "error" not in said.err
    made = load_file(tmp_path / "made" / "model.safetensors")
    stored = load_file(DEMO / "model.safetensors")
    assert made.keys() == stored.keys()
    assert all(torch.equal(made[name], stored[name]) for name in stored)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "made"}


def test_a_failed_conversion_leaves_nothing(source, tmp_path, monkeypatch, capfd):
    code = """
import json, os, sys
folder = json.loads(sys.argv[1])["folder"]
open(os.path.join(folder, "half"), "w").close()
print(json.dumps({"error": "no room is left"}))
"""
    monkeypatch.setattr(command, "CONVERT_COMMAND", (sys.executable, "-S", "-c", code))
    assert main(["convert", str(source), str(tmp_path / "made")]) == 1
    assert capfd.readouterr().err == "error: no room is left\n"
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("code", "flags", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", (), "its process was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 24)", (), "it took more than 3600 s (--time-limit)"),
        ("import time; time.sleep(600)", ("--time-limit", "1"), "more than 1 s (--time-limit)"),
        ("raise SystemExit(3)", (), "its process ended with status 3"),
    ],
)
def test_an_end_without_an_answer_is_told(source, tmp_path, monkeypatch, capfd, code, flags, said):
    monkeypatch.setattr(command, "CONVERT_COMMAND", (sys.executable, "-S", "-c", code))
    assert main(["convert", str(source), str(tmp_path / "made"), *flags]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {source}: ")
    assert said in line
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_what_a_killed_conversion_left_goes(source, tmp_path, monkeypatch):
    stale = tmp_path / ".made.part"
    stale.mkdir()
    (stale / "half").write_text("x")
    done = json.dumps({"tensors": 0, "bytes": 0, "problem": None})
    code = f"import os, json, sys; print('''{done}''')"
    monkeypatch.setattr(command, "CONVERT_COMMAND", (sys.executable, "-S", "-c", code))
    assert main(["convert", str(source), str(tmp_path / "made")]) == 0
    assert os.listdir(tmp_path / "made") == []


def test_a_folder_that_is_there_is_left_alone(source, tmp_path, capfd):
    (tmp_path / "made").mkdir()
    assert main(["convert", str(source), str(tmp_path / "made")]) == 1
    assert capfd.readouterr().err == f"error: {tmp_path / 'made'} exists already\n"
