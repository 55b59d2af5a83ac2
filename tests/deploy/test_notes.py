"""What `helm install` prints, and what `helm test` runs."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format

from deploy.helm import Helm, Object
from support.pods.harness import ServerProcess
from tokenpod_client.protos.tokenpod.v1 import generation_pb2, generation_service_pb2

MTLS = {
    "tls": {"existingSecret": "tls", "mtls": {"enabled": True}},
    "auth": {"existingSecret": "tokens"},
    "helmTest": {"tlsSecret": "client"},
}


def grpcurl(notes: str) -> list[str]:
    """The words of the command in the notes."""
    text = notes[notes.index("grpcurl") :].partition("\n\n")[0]
    return shlex.split(text.replace("\\\n", " "))


@pytest.mark.parametrize("values", [{}, MTLS, {"service": {"port": 80}}])
def test_the_notes_call_what_the_server_has(helm: Helm, values: Object) -> None:
    notes = helm.install(values).notes
    words = grpcurl(notes)
    request = json_format.Parse(words[words.index("-d") + 1], generation_pb2.GenerateRequest())
    assert request.stopping.max_new_tokens == 16
    service, _, method = words[-1].partition("/")
    found = generation_service_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    assert found.full_name == service
    assert method in found.methods_by_name
    port = values.get("service", {}).get("port", 50051)
    assert words[-2] == f"localhost:{port}"
    assert f"port-forward service/demo-tokenpod {port}:{port}" in notes


def test_the_command_in_the_notes_generates(helm: Helm, server: ServerProcess) -> None:
    words = [
        server.address if word == "localhost:50051" else word
        for word in grpcurl(helm.install().notes)
    ]
    program = Path(sys.executable).with_name(words[0])
    said = subprocess.run([program, *words[1:]], check=True, capture_output=True, text=True)
    assert '"finished"' in said.stdout


def test_the_notes_speak_tls_where_the_server_does(helm: Helm) -> None:
    assert "-plaintext" in grpcurl(helm.install().notes)
    words = grpcurl(helm.install(MTLS).notes)
    assert "-plaintext" not in words
    assert {"-cacert", "-cert", "-key", "-servername", "-H"} <= set(words)


def test_tokens_without_encryption_are_warned_of(helm: Helm) -> None:
    auth = {"auth": {"existingSecret": "tokens"}}
    assert "plaintext" in helm.install(auth).notes.partition("WARNING")[2]
    assert "WARNING" not in helm.install({**auth, "tls": {"existingSecret": "tls"}}).notes


def test_the_test_speaks_as_a_client_must(helm: Helm) -> None:
    (pod,) = helm.install(MTLS).hooks
    (each,) = pod["spec"]["containers"]
    assert "--tls-cert=/etc/tokenpod/tls/tls.crt" in each["args"]
    secrets = {
        v["name"]: v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v
    }
    assert secrets == {"tls": "client", "auth": "tokens"}
    assert "head -n 1 /etc/tokenpod/auth/tokens" in each["command"][2]


def test_the_test_can_be_left_out(helm: Helm) -> None:
    assert not helm.install({"helmTest": {"enabled": False}}).hooks
