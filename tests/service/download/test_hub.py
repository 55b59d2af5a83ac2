"""Models from a hub: what is taken, what is refused, and what a killed download leaves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from support.outside.hub import COMMIT, hub_of
from tokenpod.core.manifest import digest_of, read_manifest
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.verify import verified
from tokenpod.service.download.download import download
from tokenpod.service.download.hub import Hub
from tokenpod.service.download.store import DownloadError
from tokenpod.service.download.stores import store_of

WEIGHTS = random.Random(1).randbytes(1 << 20)
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "additional_chat_templates/tools.jinja": b"x",
    "model.safetensors.index.json": b"{}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": b"123",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again",
    "README.md": b"# model",
    "onnx/model.onnx": b"onnx",
}
LARGE = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub():
    with hub_of(dict(FILES)) as running:
        yield running


@pytest.fixture
def ask(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))

    def ask(name="org/model", revision="main", token=None, **more):
        store = Hub(name, revision, token=token, endpoint=hub.url)
        return download(store, tmp_path / "here" / "model", lambda done, total: None, **more)

    return ask


def left(tmp_path):
    return [*(tmp_path / "here").iterdir()] if (tmp_path / "here").is_dir() else []


def test_the_files_that_a_server_reads_come_with_their_digests(ask, hub):
    folder = ask().folder
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    unread = {"pytorch_model.bin", "consolidated.safetensors", "README.md", "onnx/model.onnx"}
    assert names - {"SHA256SUMS", "tokenpod-origin.json"} == FILES.keys() - unread
    assert all((folder / name).read_bytes() == FILES[name] for name in FILES.keys() - unread)
    digests = read_manifest(folder)
    assert digests == {name: digest_of(folder / name) for name in FILES.keys() - unread}
    # The files of the commit that the branch meant when it was asked.
    assert all(COMMIT in path for path, _ in hub.asked if "resolve" in path)


def test_a_downloaded_folder_is_what_its_digests_say(ask):
    """The downloader's own file in it needs no digest, and none that a server reads lacks one."""
    folder = ask().folder
    weights = [*folder.glob("model-*.safetensors")]
    assert len(weights) == 2
    with verified(folder, weights, required=True):
        pass
    (folder / "generation_config.json").write_text("{}")
    with (
        pytest.raises(ModelError, match="SHA256SUMS does not list it"),
        verified(folder, weights, required=True),
    ):
        pass


def test_what_is_there_is_not_asked_for_again(ask, hub):
    assert ask().fetched > len(WEIGHTS)
    hub.asked.clear()
    assert ask().fetched == 0
    assert hub.asked == []
    with pytest.raises(DownloadError, match=r"exists already, and holds org/model at main"):
        ask(revision="v2")


def test_pickles_come_only_where_they_are_asked_for(ask, hub, tmp_path):
    for name in [name for name in hub.files if "safetensors" in name]:
        del hub.files[name]
    with pytest.raises(DownloadError, match=r"pytorch_model\.bin alone; --pickles takes it"):
        ask()
    assert (ask(pickles=True).folder / "pytorch_model.bin").read_bytes() == b"pickle"


def test_so_do_pickled_heads(ask, hub):
    for name in [name for name in hub.files if "safetensors" in name or name.endswith(".bin")]:
        del hub.files[name]
    hub.files["medusa_lm_head.pt"] = b"pickle"
    with pytest.raises(DownloadError, match=r"weights as medusa_lm_head\.pt alone; --pickles"):
        ask()
    assert (ask(pickles=True).folder / "medusa_lm_head.pt").read_bytes() == b"pickle"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": "org/other"}, "has no model org/other, or it is private"),
        ({"revision": "v9"}, "org/model has no revision v9"),
        ({"name": "org/../x"}, "is no name of a model"),
    ],
)
def test_what_the_hub_does_not_have_is_named(ask, tmp_path, asked, said):
    with pytest.raises(DownloadError, match=r"^[^\n]+$") as caught:
        ask(**asked)
    assert said in str(caught.value)
    assert left(tmp_path) == []


def test_a_gated_model_needs_a_token(ask, hub, tmp_path):
    hub.token = "hf_secret"
    with pytest.raises(DownloadError, match=r"org/model: access to this model is restricted"):
        ask()
    with pytest.raises(DownloadError, match=r"restricted") as caught:
        ask(token="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    assert left(tmp_path) == []
    assert ask(token="hf_secret").fetched


def test_a_token_comes_from_a_file(tmp_path):
    path = tmp_path / "token"
    with pytest.raises(DownloadError, match=r"--token-file is .*token: it can't be read"):
        store_of("org/model", token_file=path)
    path.write_text("two words\n")
    with pytest.raises(DownloadError, match=r"holds no token on one line") as caught:
        store_of("org/model", token_file=path)
    assert "words" not in str(caught.value)


@pytest.mark.parametrize("lost", ["config.json", "safetensors"])
def test_a_repository_without_a_model_is_refused(ask, hub, tmp_path, lost):
    hub.files = {n: d for n, d in FILES.items() if lost not in n and not n.endswith(".bin")}
    with pytest.raises(DownloadError, match=f"org/model is no model: it has no {lost}"):
        ask()
    assert left(tmp_path) == []


def test_a_hub_that_can_not_be_reached_is_named(tmp_path):
    store = Hub("org/model", "main", endpoint="http://127.0.0.1:1")
    with pytest.raises(DownloadError, match=r"^org/model: http://127.0.0.1:1 can't be reached"):
        download(store, tmp_path / "here" / "model", lambda done, total: None)
    assert left(tmp_path) == []


def test_a_file_with_another_digest_than_the_hubs_is_refused(ask, hub):
    hub.corrupt = LARGE
    with pytest.raises(
        DownloadError, match=rf"{LARGE}: its SHA-256 is [0-9a-f]{{64}}, and the hub"
    ):
        ask()
    hub.corrupt = ""
    assert (ask().folder / LARGE).read_bytes() == WEIGHTS


@pytest.mark.pod
def test_a_killed_download_goes_on_where_it_was(hub, tmp_path):
    # The library writes pieces of 10 MB.
    weights = hub.files[LARGE] = WEIGHTS * 24
    hub.stalls = LARGE
    hub.token = "hf_secret"
    (tmp_path / "token").write_text("hf_secret\n")
    target = tmp_path / "here" / "model"
    command = [sys.executable, "-P", "-m", "tokenpod", "download", "org/model", str(target)]
    command += ["--token-file", str(tmp_path / "token")]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    part = tmp_path / "here" / ".model.part" / LARGE
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert hub.stalled.wait(120)
        for _ in range(1200):
            if part.exists() and part.stat().st_size:
                break
            time.sleep(0.05)
        assert not target.exists()
    finally:
        process.kill()
        process.wait()
    got = part.stat().st_size
    assert 0 < got < len(weights)
    hub.go_on.set()
    hub.asked.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{target}: " in done.stdout
    assert "hf_secret" not in done.stdout + done.stderr
    assert (target / LARGE).read_bytes() == weights
    ranges = [asked for path, asked in hub.asked if path.endswith(LARGE)]
    assert ranges == [f"bytes={got}-"]
    assert left(tmp_path) == [target]
