"""What ranks must agree on, and how a difference is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from support.checkpoints.demo import DEMO
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.shards.facts import difference, facts_of


def options(folder: Path = DEMO, **changes: object) -> EngineOptions:
    usual = EngineOptions(
        model_folder=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        max_batch_size=8,
        max_batch_prefill_tokens=64,
    )
    return msgspec.structs.replace(usual, **changes)


def told(theirs: EngineOptions) -> str | None:
    return difference(facts_of(options()), facts_of(theirs), 1)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "elsewhere"))


def test_a_copy_of_the_model_is_the_same_model(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=1))
    assert told(options(copy)) is None


def test_where_a_rank_runs_is_its_own_business() -> None:
    assert told(options(device="cpu:0", threads=3, memory_fraction=0.5)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_batch_size": 9}, "max_batch_size is 8 at the leader and 9 at rank 1"),
        ({"dtype": "bfloat16"}, "dtype is float32 at the leader and bfloat16 at rank 1"),
        ({"device": "cuda:1"}, "device is cpu at the leader and cuda at rank 1"),
        ({"max_total_tokens": 99}, "max_total_tokens is not set at the leader and 99 at rank 1"),
    ],
)
def test_another_option_is_named_with_both_values(changes: dict[str, object], said: str) -> None:
    assert told(options(**changes)) == said


def test_another_config_is_named(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert (told(options(copy)) or "").startswith("config.json is ")


def test_other_weights_are_named_with_their_size(copy: Path) -> None:
    with (copy / "model.safetensors").open("ab") as weights:
        weights.write(b"more")
    size = (DEMO / "model.safetensors").stat().st_size
    said = told(options(copy)) or ""
    assert f"({size} bytes in 1 files) at the leader" in said
    assert f"({size + 4} bytes in 1 files) at rank 1" in said


def test_a_fact_that_one_side_lacks_differs() -> None:
    assert difference({"a": "1"}, {"b": "2"}, 3) == (
        "a is 1 at the leader and unknown at rank 3; b is unknown at the leader and 2 at rank 3"
    )
