"""`tokenpod models`, and the page that is written of the same data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tokenpod.commands.models import WAYS, survey
from tokenpod.models.checkpoints.nested import NESTED, TEXT_MODELS
from tokenpod.models.families import FAMILIES
from tokenpod_client.cli.app import main

ROOT = Path(__file__).resolve().parents[2]


def test_every_family_of_ours_is_native_and_no_other_is():
    ours = {name for family in FAMILIES for name in family.architectures}
    alone = {name: entry for name, entry in survey().classes.items() if not entry.texts}
    native = {name for name, entry in alone.items() if entry.served == "native"}
    assert native == ours, "`make models` notes which architectures are ours"


def test_every_checkpoint_whose_text_alone_is_served_is_listed():
    listed = {name: entry.texts for name, entry in survey().classes.items() if entry.texts}
    assert listed.keys() == NESTED.keys()
    for name, texts in listed.items():
        kinds = NESTED[name].texts or tuple(TEXT_MODELS)
        assert set(texts) == {TEXT_MODELS[kind] for kind in kinds}
        assert all(
            survey().classes[text].served in ("native", "transformers", "padded") for text in texts
        )


def test_what_is_not_served_says_why_and_at_most_a_tenth_was_not_tried():
    classes = survey().classes
    assert {entry.served for entry in classes.values()} <= set(WAYS)
    for name, entry in classes.items():
        assert bool(entry.reason) == (entry.served in ("no", "untried")), name
        assert "tokenpod models" not in entry.reason, "it is where the reason is read"
    untried = [name for name, entry in classes.items() if entry.served == "untried"]
    assert len(untried) <= len(classes) / 10


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("Gemma4ForCausalLM", "native"),
        ("Llama4ForCausalLM", "transformers"),
        ("ApertusForCausalLM", "transformers"),
        ("Qwen3_5ForCausalLM", "native"),
        ("Qwen3NextForCausalLM", "native"),
        ("Qwen3_5MoeForCausalLM", "native"),
        ("JambaForCausalLM", "padded"),
        ("Mamba2ForCausalLM", "native"),
        ("RwkvForCausalLM", "padded"),
        ("T5ForConditionalGeneration", "padded"),
        ("BartForConditionalGeneration", "padded"),
    ],
)
def test_the_families_with_golden_tests_are_listed(name, served):
    assert survey().classes[name].served == served


def test_the_command_lists_who_computes_what(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "By a family of ours (" in out
    assert "Not served (" in out
    assert main(["models", "mambaFor", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["architecture"] for line in lines][-1] == "MambaForCausalLM"
    assert lines[-1]["served"] == "padded"
    assert main(["models", "RecurrentGemma", "--json"]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "returns no cache" in line["reason"]
    assert main(["models", "no such model"]) == 1


@pytest.mark.pod
def test_the_page_is_what_the_data_gives():
    command = [sys.executable, "-P", str(ROOT / "tools" / "models_page.py"), "--check"]
    subprocess.run(command, check=True)
