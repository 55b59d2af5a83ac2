"""Fields that the operator gives in place of config.json's."""

from __future__ import annotations

import json
import shutil

import pytest

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def written(folder, target, **values):
    """The same model whose file says so itself."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps(config))
    return read_config(target)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_an_override_is_what_the_file_could_have_said(golden, tmp_path, name):
    folder = golden("llama").folder
    theta = json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]
    given = {name: YARN, "max_position_embeddings": 256}
    said = {"rope_parameters": YARN | {"rope_theta": theta}, "max_position_embeddings": 256}
    overridden = read_config(folder, override=given)
    assert overridden == written(folder, tmp_path / "said", **said)
    assert overridden.max_positions == 256
    assert overridden.layers[0] != read_config(folder).layers[0]


def test_the_theta_of_rope_is_replaced_wherever_it_stands(golden, tmp_path):
    folder = golden("llama-llama3").folder
    nested = json.loads((folder / "config.json").read_text())["rope_parameters"]
    said = written(folder, tmp_path / "said", rope_parameters=nested | {"rope_theta": 77.0})
    assert read_config(folder, override={"rope_theta": 77.0}) == said
    assert said != read_config(folder)


def test_without_a_way_to_stretch_rope_keeps_its_theta(golden, tmp_path):
    folder = golden("llama-llama3").folder
    theta = json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]
    plain = {"rope_type": "default", "rope_theta": theta}
    said = written(folder, tmp_path / "said", rope_parameters=plain)
    assert read_config(folder, override={"rope_scaling": None}) == said


def test_fields_of_the_text_model_are_reached(golden):
    folder = golden("mistral3").folder
    override = {"text_config": {"max_position_embeddings": 99}}
    assert read_config(folder, override=override).max_positions == 99


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("llama", {"rope_scaling": {"type": "spiral"}}, "config_override: rope.* 'spiral' is not"),
        ("llama", {"rope_scaling": 3}, "config_override: rope_scaling is 3; expected an object"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings is 0; expected a whole"),
        ("llama", {"max_positions": 9}, "LlamaForCausalLM does not read max_positions"),
        ("opt", {"rope_scaling": YARN}, "OPTForCausalLM does not read rope_scaling"),
        ("mistral3", {"max_position_embeddings": 9}, "does not read max_position_embeddings"),
        ("mistral3", {"text_config": {"max_positions": 9}}, "does not read max_positions"),
        ("gemma3", {"rope_theta": 5.0}, "rope differs by the type of layer"),
    ],
)
def test_an_override_that_can_not_be(golden, name, override, message):
    with pytest.raises(ModelError, match=message) as caught:
        read_config(golden(name).folder, override=override)
    assert "\n" not in str(caught.value)
