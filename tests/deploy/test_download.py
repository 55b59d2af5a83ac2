"""An init container that fetches the model: run as it is written, against a hub of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.helm import Helm, Object
from deploy.manifests import container_of, mounts, pod_of, settings_of, volumes
from support.outside.hub import hub_of
from tokenpod_client.cli.app import main

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


def values(**download: Any) -> Object:
    return {"model": {"source": "download", "download": {"url": "org/model", **download}}}


def pod(helm: Helm, given: Object) -> Object:
    return pod_of(helm.install(given).one("Deployment"))


def init_container(pod: Object) -> Object:
    (found,) = pod["spec"]["initContainers"]
    return found


def test_it_fetches_what_the_server_reads(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = pod(helm, values(revision="v2", existingSecret="hub"))
    container = init_container(given)
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    here = {"/model/": f"{tmp_path}/", "/etc/tokenpod/hub/token": str(token)}
    arguments = [*container["command"][1:], *container["args"]]
    for there, place in here.items():
        arguments = [each.replace(there, place) for each in arguments]
    with hub_of(FILES) as hub:
        hub.token = "hf_secret"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        assert main(arguments) == 0
        folder = Path(settings_of(given).model_id)
        assert folder.parent == Path("/model")
        fetched = {path.name for path in (tmp_path / folder.name).iterdir()}
        assert fetched == {*FILES, "SHA256SUMS", "tokenpod-origin.json"}
        # A pod that starts again needs no hub.
        hub.asked.clear()
        assert main(arguments) == 0
        assert hub.asked == []


def test_it_is_as_restricted_as_the_server(helm: Helm) -> None:
    given = pod(helm, values())
    container, server = init_container(given), container_of(given)
    assert container["securityContext"] == server["securityContext"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["image"] == server["image"]
    assert container["resources"]["limits"] == {"memory": "1Gi"}


def test_the_claim_is_the_charts_or_a_named_one(helm: Helm) -> None:
    rendered = helm.install(values(claim={"size": "7Gi", "accessModes": ["ReadWriteMany"]}))
    claim = rendered.one("PersistentVolumeClaim")
    assert claim["spec"]["resources"] == {"requests": {"storage": "7Gi"}}
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    given = pod_of(rendered.one("Deployment"))
    wanted = {"claimName": claim["metadata"]["name"]}
    assert volumes(given)["model"] == {"name": "model", "persistentVolumeClaim": wanted}
    # The server can't write to it.
    assert mounts(given)["/model"]["readOnly"] is True
    named = values()
    named["model"]["existingClaim"] = "models"
    rendered = helm.install(named)
    assert rendered.all("PersistentVolumeClaim") == []
    model = volumes(pod_of(rendered.one("Deployment")))["model"]
    assert model["persistentVolumeClaim"] == {"claimName": "models"}


def test_the_token_is_a_file_that_the_init_container_alone_has(helm: Helm) -> None:
    given = pod(helm, values(existingSecret="hub", key="hf"))
    assert volumes(given)["hub"]["secret"]["items"] == [{"key": "hf", "path": "token"}]
    assert "--token-file=/etc/tokenpod/hub/token" in init_container(given)["args"]
    assert "/etc/tokenpod/hub" not in mounts(given)
    without = pod(helm, values())
    assert "hub" not in volumes(without)
    assert not any("token" in each for each in init_container(without)["args"])


def test_another_revision_gets_another_folder(helm: Helm) -> None:
    folders = {
        settings_of(pod(helm, given)).model_id
        for given in (values(), values(revision="v2"), values(url="s3://bucket/a b/c"[:13]))
    }
    assert len(folders) == 3
    named = values()
    named["model"]["path"] = "llama"
    assert settings_of(pod(helm, named)).model_id == "/model/llama"


def test_a_rollout_may_take_as_long_as_the_download(helm: Helm) -> None:
    plain = helm.install().one("Deployment")["spec"]["progressDeadlineSeconds"]
    spec = helm.install(values(deadlineSeconds=1000)).one("Deployment")["spec"]
    assert spec["progressDeadlineSeconds"] == plain + 1000


def test_a_policy_lets_the_download_out(helm: Helm) -> None:
    given = {**values(), "networkPolicy": {"enabled": True}}
    egress = helm.install(given).one("NetworkPolicy")["spec"]["egress"]
    ports = {each["port"] for rule in egress for each in rule["ports"]}
    assert ports == {53, 443}
