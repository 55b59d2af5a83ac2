"""`tokenpod gateway`: a pod with OpenAI's API before it, as one command starts both.

SMG_VENV names a virtual environment with the packages smg and openai; without it these are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.outside import gateway_client
from support.outside.certificates import make_authority, make_certificate
from support.pods.harness import TOKENPOD, children_of, free_port
from support.texts import fixed_text
from support.texts.chat_templates import QWEN
from support.waiting import wait_for
from tokenpod_client import Client, ServerError

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("SMG_VENV", "/nowhere"))
with_gateway = pytest.mark.skipif(
    "SMG_VENV" not in os.environ, reason="SMG_VENV names no environment with smg and openai"
)


@dataclass
class Door:
    process: subprocess.Popen[bytes]
    port: int
    pod: str
    log: Path
    scheme: str = "http"

    def ask(self, what: str, **environment: str) -> Any:
        """What gateway_client.py tells."""
        command = [str(VENV / "bin" / "python"), gateway_client.__file__]
        command += [f"{self.scheme}://localhost:{self.port}", what]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, timeout=300, env=os.environ | environment
        )
        return json.loads(done.stdout)


@contextlib.contextmanager
def opened(folder: Path, *flags: str) -> Iterator[Door]:
    port, pod, log = free_port(), free_port(), folder / "log"
    command = [*TOKENPOD, "gateway", "--gateway-python", str(VENV / "bin" / "python")]
    command += ["--http-port", str(port), "--port", str(pod), "--threads", "1"]
    command += ["--health-port", "0", "--lame-duck-seconds", "0", *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    scheme = "https" if "--http-tls-cert" in flags else "http"
    door = Door(process, port, f"localhost:{pod}", log, scheme)
    try:
        wait_for(lambda: "OpenAI's API: " in log.read_text() or process.poll() is not None, 240)
        assert process.poll() is None, (process.wait(), log.read_text())
        yield door
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(120)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with opened(tmp_path_factory.mktemp("door")) as found:
        yield found
        children = children_of(found.process.pid)
        assert len(children) == 2
        found.process.send_signal(signal.SIGINT)
        assert found.process.wait(120) == 0
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@with_gateway
def test_openais_client_chats_streams_and_gets_json(door: Door) -> None:
    told = door.ask("texts")
    assert told["models"] == ["demo"]
    assert told["text"] == told["streamed"] != ""
    assert told["said"] == told["said_streamed"] != ""
    assert len(told["logprobs"]) == 12
    assert told["stopped"][1] == "stop"
    assert json.loads(told["constraint"]) == {"a": 1}


@with_gateway
@pytest.mark.parametrize("page", ["README.md", "docs/openai.md"])
def test_what_pages_say_of_openais_client_runs(door: Door, page: str) -> None:
    """As it stands, but for the address, the model and an end: the demo model finds none."""
    text = (ROOT / page).read_text()
    (code,) = re.findall(r"^```python\n(from openai .*?)^```$", text, re.MULTILINE | re.DOTALL)
    here = code.replace("127.0.0.1:8000", f"127.0.0.1:{door.port}")
    here = here.replace("/models/Qwen3-0.6B", "demo").replace(
        "messages=", "max_tokens=8, messages="
    )
    command = [str(VENV / "bin" / "python"), "-c", here]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300).stdout


@with_gateway
def test_calls_that_must_be_made_are_made_and_short(door: Door) -> None:
    told = door.ask("forced")
    for name in ("required", "named"):
        calls, finish, tokens = told[name]
        assert {tool for tool, _ in calls} == {"look"}
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        assert finish in ("tool_calls", "stop")
        # The demo model fills hundreds of tokens with spaces where it may.
        assert tokens < 100
        assert told[f"{name} streamed"] == calls
    assert len(set(told["n"])) == 2
    one, again, other = told["seed"]
    assert one == again != other


@with_gateway
def test_a_client_that_leaves_ends_its_call(door: Door) -> None:
    door.ask("left")
    ended = re.compile(r"rpc=vllm\S+Generate .*output_tokens=(\d+) finish=abort")
    wait_for(lambda: bool(ended.search(door.log.read_text())))
    found = ended.search(door.log.read_text())
    assert found is not None
    assert int(found[1]) < 1900


@with_gateway
def test_the_gateway_reads_calls_by_the_models_template(tmp_path: Path) -> None:
    said = "Let me| look.|\n<tool|_call>\n{'na|me': 'lo|ok', 'argum|ents': {'q'|: 'ab'}|}\n</tool_|"
    pieces = [*said.replace("'", '"').split("|")[:-1], "call>"]
    model = fixed_text.save(tmp_path / "speaker", pieces, QWEN)
    with opened(tmp_path, str(model), "--served-model-name", "speaker") as door:
        told = door.ask("tools")
    for choice in ("auto", "None"):
        assert [(name, json.loads(text)) for name, text in told[choice][1]] == [
            ("look", {"q": "ab"})
        ]
        assert told[f"{choice} streamed"][2] == "tool_calls"


@with_gateway
def test_clients_show_a_key_over_tls(tmp_path: Path) -> None:
    make_authority(tmp_path, "ca")
    make_certificate(tmp_path, "server", "ca")
    (tmp_path / "keys").write_text("first-key\nsecond-key\n")
    flags = ["--http-tls-cert", str(tmp_path / "server.pem"), "--http-tls-key"]
    flags += [str(tmp_path / "server.key"), "--api-key-file", str(tmp_path / "keys")]
    # gRPC's clients come over TLS and show a token; the gateway does neither.
    (tmp_path / "tokens").write_text("grpc-token\n")
    flags += ["--tls-cert", str(tmp_path / "server.pem"), "--tls-key", str(tmp_path / "server.key")]
    flags += ["--auth-token-file", str(tmp_path / "tokens")]
    with opened(tmp_path, *flags) as door:
        trusted = str(tmp_path / "ca.pem")
        tls = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
        with Client(door.pod, credentials=tls) as client, pytest.raises(ServerError) as refused:
            client.generate("x", max_new_tokens=1).text()
        assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        with Client(door.pod, credentials=tls, token="grpc-token") as client:
            assert client.generate("x", max_new_tokens=2, ignore_eos=True).text()
        for key in ("first-key", "second-key"):
            assert door.ask("left", TRUSTED=trusted, KEY=key)["first"] is not None
        with pytest.raises(subprocess.CalledProcessError):
            door.ask("left", TRUSTED=trusted, KEY="third-key")
        # Keys are in nobody's list of processes.
        for child in children_of(door.process.pid):
            assert "first-key" not in Path(f"/proc/{child}/cmdline").read_text()


def refused(*flags: str) -> str:
    done = subprocess.run(
        [*TOKENPOD, "gateway", *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (1, 2)
    return done.stderr


def test_what_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("x\n")
    text = refused("--auth-token-file", str(tmp_path / "tokens"))
    assert "shows the pod no token" in text
    assert "--api-key-file" in text
    assert "--port is 0" in refused("--port", "0")
    assert "--max-best-of" in refused("--max-best-of", "0")
    if "smg" not in sys.modules:
        with contextlib.suppress(ImportError):
            import smg  # type: ignore[import-not-found]  # noqa: F401

            return
        assert "pip install 'tokenpod[gateway]'" in refused()
