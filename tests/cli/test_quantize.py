"""`tokenpod quantize`, as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenpod_client.cli.app import main

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.mark.pod
def test_a_checkpoint_is_quantised_by_a_process_in_groups_of_the_size_that_is_asked_for(
    tmp_path, capfd
):
    made = tmp_path / "made"
    flags = ["--format", "int4", "--group-size", "32"]
    assert main(["quantize", str(DEMO), str(made), *flags]) == 0
    assert "56 weights as int4, " in capfd.readouterr().out
    config = json.loads((made / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["weights"]["group_size"] == 32
    assert {path.name for path in tmp_path.iterdir()} == {"made"}
    # What is there already is left alone.
    assert main(["quantize", str(made), str(made)]) == 1
    assert f"{made} exists already" in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"made"}


def test_flags_that_do_not_go_together_are_refused(tmp_path, capfd):
    flags = ["--format", "int8", "--group-size", "64"]
    assert main(["quantize", str(DEMO), str(tmp_path / "made"), *flags]) == 1
    assert "--group-size is for --format int4" in capfd.readouterr().err
