"""The script of `helm test`, run against real servers."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.helm import Helm, Object
from support.outside.certificates import make_authority, make_certificate
from support.pods.harness import serve

TLS: Object = {"tls": {"existingSecret": "server-tls"}}
SECONDS = 120


class Script:
    """The test's container: its files in a folder, `tokenpod` this one."""

    def __init__(self, helm: Helm, scratch: Path, values: Object) -> None:
        (self.pod,) = helm.install(values).hooks
        (self._container,) = self.pod["spec"]["containers"]
        self.folder = scratch / "etc"
        self.folder.mkdir()
        program = scratch / "bin" / "tokenpod"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m tokenpod "$@"\n')
        program.chmod(0o755)
        self._path = f"{program.parent}:{os.environ['PATH']}"

    def put(self, volume: str, name: str, text: str) -> None:
        folder = self.folder / volume
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    def start(self, address: str) -> subprocess.Popen[str]:
        first, *args = self._container["args"]
        assert first.startswith("--address=")
        words = [*self._container["command"], f"--address={address}", *args]
        words = [word.replace("/etc/tokenpod", str(self.folder)) for word in words]
        return subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": self._path},
        )

    def run(self, address: str) -> tuple[int, str]:
        """Exit status, and what it said."""
        process = self.start(address)
        said, _ = process.communicate(timeout=SECONDS)
        return process.returncode, said


@pytest.mark.slow
def test_it_waits_for_a_server_that_is_still_starting(helm: Helm, tmp_path: Path) -> None:
    script = Script(helm, tmp_path, {})
    with serve(wait=False) as starting:
        status, said = script.run(starting.address)
    assert status == 0, said
    assert "can't reach" in said or "UNAVAILABLE" in said


def test_it_ends_at_its_deadline_with_the_reason(helm: Helm, tmp_path: Path) -> None:
    script = Script(helm, tmp_path, {"helmTest": {"deadlineSeconds": 1}})
    status, said = script.run("127.0.0.1:9")
    assert status == 1
    assert "can't reach 127.0.0.1:9" in said


def test_an_answer_that_waiting_does_not_change_ends_it_at_once(helm: Helm, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("right\n")
    script = Script(helm, tmp_path, {"auth": {"existingSecret": "tokens"}})
    with serve("--auth-token-file", str(tokens)) as server:
        script.put("auth", "tokens", "wrong\n")
        status, said = script.run(server.address)
        assert status == 1
        assert said.count("UNAUTHENTICATED") == 1
        script.put("auth", "tokens", "right\nother\n")
        assert script.run(server.address)[0] == 0


@pytest.fixture
def pems(tmp_path: Path) -> Path:
    make_authority(tmp_path, "ca")
    make_certificate(tmp_path, "server", "ca")
    return tmp_path


def test_a_certificate_without_its_authority_is_said_to_lack_it(
    helm: Helm, tmp_path: Path, pems: Path
) -> None:
    # It would be waited for longer than the script is here: what is wrong ends it.
    script = Script(helm, tmp_path, {**TLS, "helmTest": {"deadlineSeconds": 10 * SECONDS}})
    (volume,) = [each for each in script.pod["spec"]["volumes"] if each["name"] == "tls"]
    assert volume["secret"]["optional"] is True, "or the pod is never created"
    pair = ("--tls-cert", str(pems / "server.pem"), "--tls-key", str(pems / "server.key"))
    with serve(*pair) as server:
        status, said = script.run(server.address)
        assert status == 1
        assert "the secret server-tls has no ca.crt" in said
        assert said.count("CERTIFICATE_VERIFY_FAILED") == 1
        script.put("tls", "ca.crt", (pems / "ca.pem").read_text())
        assert script.run(server.address)[0] == 0
