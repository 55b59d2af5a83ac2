"""Where the adapters lie that an operator names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenpod.service.pod.model_store import ModelNotFound, adapter_folders

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache that has two revisions of an adapter."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    adapter = tmp_path / "hub" / "models--org--sql"
    (adapter / "refs").mkdir(parents=True)
    for name, commit in COMMITS.items():
        (adapter / "refs" / name).write_text(commit)
        (adapter / "snapshots" / commit).mkdir(parents=True)
        (adapter / "snapshots" / commit / "adapter_config.json").write_text("{}")
    return adapter / "snapshots"


def test_a_place_is_a_folder_or_a_name_with_or_without_a_revision(
    cache: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "adapter_config.json").write_text("{}")
    named = f"mine={own}, new=org/sql@v2,org/sql,exact=org/sql@{COMMITS['v2']}"
    assert adapter_folders(named) == [
        ("mine", str(own)),
        ("new", str(cache / COMMITS["v2"])),
        ("org/sql", str(cache / COMMITS["main"])),
        ("exact", str(cache / COMMITS["v2"])),
    ]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("x=org/sql@v3", "--lora-adapters names x: the cache has main, v2 of org/sql"),
        ("x=org/other", "--lora-adapters names x: there is no such folder, and the cache"),
        ("x=org/sql@../../etc", "--lora-adapters names x: the cache has main, v2"),
    ],
)
def test_what_is_not_there_is_named(cache: Path, place: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as error:
        adapter_folders(place)
    assert str(error.value).startswith(said)
