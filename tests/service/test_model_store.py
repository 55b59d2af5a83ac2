"""Where a model is found, and what is said when it isn't."""

from __future__ import annotations

import pytest

from support.outside.hub import hub_of
from tokenpod.service.config.sources import load_settings
from tokenpod.service.pod.model_store import ModelNotFound, model_folder, resolve_model
from tokenpod.service.pod.placement import lone_options

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
        ("org/other", None, "get it with `tokenpod download org/other FOLDER`"),
        ("gpt2", None, "get it with `hf download gpt2`"),
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


def test_a_model_is_downloaded_only_if_a_setting_says_so(tmp_path, monkeypatch):
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    with hub_of(files) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        with pytest.raises(ModelNotFound):
            model_folder(load_settings(model_id="org/model"))
        assert hub.asked == []
        wanted = {"model_id": "org/model", "download": tmp_path / "model"}
        with pytest.raises(ModelNotFound, match=r"^--download is .*model: org/model has no rev"):
            model_folder(load_settings(**wanted, revision="v9"))
        folder = model_folder(load_settings(**wanted, revision="v2"))
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    # It is there: the next start does not need the hub.
    assert model_folder(load_settings(**wanted, revision="v2")) == folder == tmp_path / "model"


def test_the_engine_is_told_whether_a_manifest_is_required(tmp_path):
    for required in (False, True):
        options = lone_options(load_settings(require_manifest=required), tmp_path)
        assert options.require_manifest == required
