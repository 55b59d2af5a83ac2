"""docs/kubernetes.md names what is there."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from deploy.helm import CHART, Helm
from deploy.schemas import validate

PAGE = (CHART.parents[2] / "docs" / "kubernetes.md").read_text()
SCHEMA: Any = json.loads((CHART / "values.schema.json").read_text())


def exists(path: str) -> bool:
    """Whether a value of this name may be set."""
    schema = SCHEMA
    for name in path.split("."):
        if "properties" not in schema:
            return True
        if name not in schema["properties"]:
            return False
        schema = schema["properties"][name]
    return True


def test_every_value_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([a-z][a-zA-Z]*(?:\.[a-zA-Z]+)+)[`:]", PAGE))
    foreign = ("grpc.", "tokenpod.", "limits.")
    files = (".crt", ".key")
    named = {name for name in named if not name.startswith(foreign) and not name.endswith(files)}
    assert len(named) > 20
    assert not {name for name in named if not exists(name)}


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_values_that_the_page_shows_can_be_installed(helm: Helm, text: str) -> None:
    for each in helm.install(yaml.safe_load(text)).objects:
        validate(each, "1.34")


def test_the_page_has_every_example() -> None:
    for path in (CHART / "examples").glob("*.yaml"):
        assert f"examples/{path.name})" in PAGE


def test_the_drains_defaults_are_those_of_the_page() -> None:
    values = (CHART / "values.yaml").read_text()
    for name, seconds in re.findall(r"(\w+Seconds): (\d+)\n", values.partition("drain:")[2])[:3]:
        assert re.search(rf"\b{seconds} s\b", PAGE), name
