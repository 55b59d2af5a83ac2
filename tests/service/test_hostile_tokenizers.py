"""No field of a tokenizer's files costs more than an error, or a line in the log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.clients.hostile_fields import HOSTILE, attack
from tokenpod.service.pod.model_store import resolve_model
from tokenpod.service.text.tokenizers.generation_defaults import read_defaults
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer, TokenizerError

FIELDS = {
    "tokenizer_config.json": {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "added_tokens_decoder": {"5": {"content": "<extra>", "special": True, "rstrip": False}},
        "additional_special_tokens": ["<one>"],
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "generation_config.json": {
        "eos_token_id": [1],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
    },
    "config.json": {"vocab_size": 1024, "eos_token_id": 1, "text_config": {"vocab_size": 1024}},
}


@pytest.mark.parametrize("each", [2, pytest.param(len(HOSTILE), marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FIELDS)
def test_a_field_of_a_tokenizer(file, each, tmp_path):
    demo = resolve_model("demo", None)
    shutil.copyfile(demo / "tokenizer.json", tmp_path / "tokenizer.json")
    if file != "config.json":
        size = json.loads((demo / "config.json").read_text())["vocab_size"]
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))

    def read(folder: Path) -> None:
        read_defaults(folder)
        Tokenizer.load(folder)

    attack(FIELDS[file], tmp_path / file, read, TokenizerError, each)
