"""Where a model is found, and what is said when it isn't."""

from __future__ import annotations

import pytest

from tokenpod.service.pod.model_store import ModelNotFound, resolve_model

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    model = tmp_path / "hub" / "models--org--name"
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def test_demo_is_the_embedded_model():
    assert (resolve_model("demo") / "__init__.py").is_file()


def test_a_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_name_is_looked_up_in_the_cache_by_branch_or_commit(cache):
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    assert resolve_model("org/name") == snapshot
    assert resolve_model("org/name", "main") == snapshot
    assert resolve_model("org/name", COMMIT) == snapshot


@pytest.mark.parametrize(
    ("model_id", "revision", "expected"),
    [
        ("org/other", None, "get it with `hf download org/other`"),
        (
            "org/name",
            "v2",
            "the cache has main of org/name; get it with `hf download org/name --rev",
        ),
        ("org/name", "b" * 40, "--revision is bbb"),
        ("org/name", "../../../secret", "--revision is ../../../secret"),
        ("/no/such/folder", None, "--model-id is /no/such/folder: there is no such folder"),
        ("demo", "main", "--revision is main: only models in the hub's cache"),
        (__file__, None, "that is a file"),
    ],
)
def test_what_is_not_there_is_named(cache, model_id, revision, expected):
    with pytest.raises(ModelNotFound, match=r"^[^\n]+$") as caught:
        resolve_model(model_id, revision)
    assert expected in str(caught.value)


def test_a_folder_without_a_config_is_no_model(tmp_path):
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
