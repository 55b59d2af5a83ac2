"""What a model's folder says of how its tokens are chosen, and who says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenpod.service.text.tokenizers.files import TokenizerError
from tokenpod.service.text.tokenizers.generation_defaults import read_defaults, with_defaults

LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}
QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}


def read(folder: Path, config: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return read_defaults(folder)


def test_published_files_are_read(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == {}
    assert read(tmp_path, LLAMA) == {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert read(tmp_path, QWEN) == QWEN
    assert read(tmp_path, {"eos_token_id": 5}) == {}


def test_temperature_counts_where_the_model_is_to_be_sampled(tmp_path: Path) -> None:
    assert read(tmp_path, {"temperature": 0.6, "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1
    }
    assert read(tmp_path, {"do_sample": True, "temperature": 0.0, "top_k": 5}) == {}


@pytest.mark.parametrize(
    "odd",
    [
        *({"temperature": -1}, {"temperature": 1e9}, {"temperature": "warm"}, {"top_k": -5}),
        *({"top_p": 1.5}, {"top_k": 2**40}, {"min_p": True}, {"repetition_penalty": 0}),
        *({"top_p": None}, {"typical_p": 1.0}, {"top_k": [1]}, {"temperature": float("nan")}),
    ],
    ids=str,
)
def test_what_is_not_within_our_bounds_is_left_out(tmp_path: Path, odd: dict[str, Any]) -> None:
    assert read(tmp_path, {"do_sample": True, **odd}) == {"do_sample": True}


def test_a_file_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="generation_config"):
        read(tmp_path, [1])


def test_a_request_says_otherwise() -> None:
    defaults = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    assert with_defaults({}, defaults) == defaults
    assert with_defaults({"top_k": 0, "seed": 3}, defaults) == {**defaults, "top_k": 0, "seed": 3}
    for greedy in ({"do_sample": False}, {"temperature": 0.0}):
        assert with_defaults(greedy, defaults) == {**greedy, "repetition_penalty": 1.05}
