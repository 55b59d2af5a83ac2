"""Models from object stores: S3 on a server of its own, the others by fsspec's memory."""

from __future__ import annotations

import errno
import os
import random
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from tokenpod.core.manifest import digest_of
from tokenpod.service.download import object_store, stores
from tokenpod.service.download.download import download
from tokenpod.service.download.store import DownloadError
from tokenpod.service.download.stores import store_of

WEIGHTS = random.Random(1).randbytes(100_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"#", "a/b.json": b"{}"}


def fetch(url, target):
    return download(store_of(url), target, lambda done, total: None)


def holds_the_model(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "SHA256SUMS", "tokenpod-origin.json"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    return True


@pytest.fixture(scope="module")
def s3():
    """The address of a server with a bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="id",
        aws_secret_access_key="key",
    )
    client.create_bucket(Bucket="bucket")
    for name, data in FILES.items():
        client.put_object(Bucket="bucket", Key=f"models/tiny/{name}", Body=data)
    yield url
    server.stop()


def test_a_model_comes_from_s3(s3, tmp_path, monkeypatch):
    variables = {"ENDPOINT_URL": s3, "ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "key"}
    for name, value in {**variables, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(object_store, "_PIECE", 30_000)
    done = fetch("s3://bucket/models/tiny", tmp_path / "model")
    assert done.fetched == len(WEIGHTS) + 2
    assert holds_the_model(tmp_path / "model")
    for lost, said in [
        ("bucket/models/other", "there is no such folder, or it is empty"),
        ("bucket/models", "is no model: it has no config.json"),
        ("no-such-bucket/model", "there is no such folder"),
    ]:
        with pytest.raises(DownloadError, match=f"^s3://{lost}[^\n]*{said}"):
            fetch(f"s3://{lost}", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_unreachable_store_is_one_line(tmp_path, monkeypatch):
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(DownloadError, match=r"^s3://unreached/model: can't be read \([^\n]*"):
        fetch("s3://unreached/model", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


class Memory(MemoryFileSystem):
    """fsspec's own, under the schemes of stores; files are its alone."""

    protocol = ("gs", "az")
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.partition("://")[2] if "://" in path else path


@pytest.fixture(params=["gs", "az"])
def memory(request, monkeypatch):
    """The scheme of a store that holds the model."""
    monkeypatch.setitem(stores.STORES, request.param, ("fsspec", request.param))
    monkeypatch.setattr(Memory, "store", {})
    fsspec.register_implementation(request.param, Memory, clobber=True)
    for name, data in FILES.items():
        Memory().pipe_file(f"/bucket/tiny/{name}", data)
    yield request.param
    _registry.pop(request.param)


def test_other_stores_are_read_alike(memory, tmp_path):
    fetch(f"{memory}://bucket/tiny", tmp_path / "model")
    assert holds_the_model(tmp_path / "model")


def break_off(monkeypatch, after):
    """Let the store fail after so many pieces of weights."""
    whole = Memory.cat_file
    pieces = []

    def cat_file(self, path, start=None, end=None, **more):
        if path.endswith("safetensors"):
            if len(pieces) == after:
                raise TimeoutError("no answer")
            pieces.append(start)
        return whole(self, path, start, end, **more)

    monkeypatch.setattr(object_store, "_PIECE", 30_000)
    monkeypatch.setattr(Memory, "cat_file", cat_file)
    return pieces


def test_a_download_that_broke_off_goes_on(memory, tmp_path, monkeypatch):
    url = f"{memory}://bucket/tiny"
    with monkeypatch.context() as patch:
        break_off(patch, 2)
        with pytest.raises(DownloadError, match=r"model.safetensors: can't be read \(no answer\)"):
            fetch(url, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    pieces = break_off(monkeypatch, 99)
    fetch(url, tmp_path / "model")
    assert pieces == [60_000, 90_000]
    assert holds_the_model(tmp_path / "model")


def test_what_is_left_of_another_version_is_dropped(memory, tmp_path, monkeypatch):
    url = f"{memory}://bucket/tiny"
    with monkeypatch.context() as patch:
        break_off(patch, 2)
        with pytest.raises(DownloadError):
            fetch(url, tmp_path / "model")
    changed = WEIGHTS[::-1]
    Memory().pipe_file("/bucket/tiny/model.safetensors", changed)
    fetch(url, tmp_path / "model")
    assert (
        digest_of(tmp_path / "model" / "model.safetensors")
        in (tmp_path / "model" / "SHA256SUMS").read_text()
    )
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == changed


def test_a_full_disk_leaves_nothing(memory, tmp_path, monkeypatch):
    import resource

    here = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, here[1]))
    try:
        with pytest.raises(DownloadError, match=r"no room is left for it \(File too large\)$"):
            fetch(f"{memory}://bucket/tiny", tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, here)
    assert list(tmp_path.iterdir()) == []
    assert os.strerror(errno.EFBIG) == "File too large"


def test_a_disk_without_room_is_told_before_anything_is_fetched(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(99))
    with pytest.raises(DownloadError, match=r"100,002 bytes are to be downloaded, .* room for 99"):
        fetch(f"{memory}://bucket/tiny", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


class _Usage:
    def __init__(self, free):
        self.free = free


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("ftp://host/model", "ftp:// is not supported (supported: s3://, gs://, az://)"),
        ("model", "neither a name on a hub"),
        ("../model/x", "neither a name on a hub"),
    ],
)
def test_other_addresses_are_refused(model, said):
    with pytest.raises(DownloadError) as caught:
        store_of(model)
    assert said in str(caught.value)


def test_a_store_whose_library_is_missing_names_its_extra(monkeypatch):
    monkeypatch.setitem(stores.STORES, "gs", ("no_such_library", "gs"))
    with pytest.raises(DownloadError, match=r"pip install 'tokenpod\[gs\]'"):
        store_of("gs://bucket/model")


def test_revisions_are_a_hubs(tmp_path):
    with pytest.raises(DownloadError, match=r"--revision is v1: only models of a hub"):
        store_of("s3://bucket/model", "v1")
