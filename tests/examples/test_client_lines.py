"""The lines of docs/clients.md run as their readers would run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from support.clients.public_api import generate, text_request
from support.outside.certificates import make_authority, make_certificate
from support.pods.harness import ServerProcess, serve

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
STUBS = ROOT / "gen" / "go"
PROMPT = "def main():"
#: What builds make in the folders of examples.
BUILT = shutil.ignore_patterns("gen", "target", "node_modules", "*_pb2*", "__pycache__")
TOKEN = "s3cret"
#: The environment's own programs are found, as where it is active.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def blocks(title: str) -> list[str]:
    """The lines for a shell below a title of the page, block by block."""
    section = PAGE[PAGE.index(f"\n## {title}\n") + 1 :].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)


def needs(*programs: str) -> None:
    if lacking := [name for name in programs if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"{lacking[0]} is not installed")


def shell(lines: str, folder: Path, **env: str) -> str:
    """What lines print."""
    done = subprocess.run(
        ["sh", "-ec", lines],
        cwd=folder,
        env={**os.environ, "PATH": PATH, **env},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def expected(stub) -> str:
    """What an example prints: the greedy text, and how it ended."""
    stream = generate(stub, text_request(PROMPT, stopping={"max_new_tokens": 32}))
    finished = stream.samples[0].finished
    return f"{finished.text}\n[{finished.generated_token_count} tokens; FINISH_REASON_LENGTH]\n"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout with nothing that was built."""
    for name in ("protos", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=BUILT)
    shutil.copytree(STUBS, tmp_path / "gen" / "go")
    return tmp_path


@pytest.fixture(scope="module")
def secured(tmp_path_factory) -> Iterator[tuple[ServerProcess, Path]]:
    """A pod with TLS that wants a token, and a folder with the files of its clients."""
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder, "ca")
    for name in ("pod", "client"):
        make_certificate(folder, name, "ca")
    (folder / "tokens").write_text(f"{TOKEN}\n")
    flags = ["--tls-cert", str(folder / "pod.pem"), "--tls-key", str(folder / "pod.key")]
    with serve(*flags, "--auth-token-file", str(folder / "tokens")) as pod:
        yield pod, folder


def at(lines: str, server: ServerProcess) -> str:
    """Lines that call this server."""
    return re.sub(r"(localhost|127\.0\.0\.1):50051", server.address, lines)


def lines_of(block: int) -> list[str]:
    return blocks("grpcurl and buf")[block].splitlines()


@pytest.mark.parametrize("line", lines_of(0))
def test_a_line_of_grpcurl_or_buf_is_answered(server, tmp_path, line):
    needs(line.split()[0])
    said = shell(at(line, server), tmp_path)
    wanted = {"Tokenize": "okenCount", "GenerateOnce": '"results"', "Check": "SERVING"}
    name = line.rpartition("/")[2]
    if name == "Generate":
        assert [said.count(f'"{kind}":') for kind in ("started", "completed")] == [1, 1]
        assert said.count('"tokens"') > 1
    else:
        assert wanted.get(name, "GenerateRequest") in said.replace("token_count", "tokenCount")


@pytest.mark.parametrize("line", lines_of(1))
def test_a_line_with_tls_and_a_token_is_answered(secured, line):
    needs("grpcurl")
    pod, folder = secured
    assert shell(at(line, pod), folder, TOKEN=TOKEN)
    with pytest.raises(AssertionError, match="Unauthenticated"):
        shell(at(line, pod), folder, TOKEN="another")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("title", "block", "programs", "refusal"),
    [
        ("Go", 0, ("go",), "InvalidArgument: text is empty"),
        ("TypeScript and JavaScript", 0, ("node", "npm"), "InvalidArgument: text is empty"),
        ("TypeScript and JavaScript", 1, ("node", "npm"), "INVALID_ARGUMENT: text is empty"),
        # Maven's plugin passes no empty argument on.
        ("Java", 0, ("mvn", "javac"), None),
        ("Rust", 0, ("cargo",), "InvalidArgument: text is empty"),
    ],
)
def test_an_example_streams_from_a_checkout(
    server, checkout, expected, title, block, programs, refusal
):
    needs(*programs)
    lines = at(blocks(title)[block], server)
    said = shell(lines, checkout)
    # Tools around it, such as npm, print lines of their own.
    assert expected in said
    if refusal is None:
        return
    empty = lines.replace(f"'{PROMPT}'", "''").replace(f'"{PROMPT}"', '""')
    with pytest.raises(AssertionError, match=refusal):
        shell(empty, checkout)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_go_program_of_its_own_gets_the_module(server, tmp_path, expected):
    needs("go")
    shutil.copy(ROOT / "examples" / "go" / "main.go", tmp_path)
    shell(blocks("Go")[1], tmp_path, TOKENPOD=str(ROOT))
    said = shell(f'go run . {server.address} "{PROMPT}"', tmp_path)
    assert said == expected


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_go_stubs_are_what_their_template_makes(tmp_path):
    needs("go", "buf")
    (command,) = re.findall(r"`(buf generate [^`]+)`", (STUBS / "buf.gen.yaml").read_text())
    shell(f"{command} --output {tmp_path}", ROOT)
    folder = Path("tokenpod/v1")
    made = {path.name: path.read_text() for path in (tmp_path / "gen/go" / folder).iterdir()}
    assert made == {path.name: path.read_text() for path in (STUBS / folder).iterdir()}


_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|(.))")
_LETTERS = dict(zip(b'ntrabfv"\\', b'\n\t\r\a\b\f\v"\\', strict=True))


def _byte(found: re.Match[bytes]) -> bytes:
    if found[1]:
        return bytes.fromhex(found[1].decode())
    return chr(int(found[2], 16)).encode() if found[2] else bytes([_LETTERS[ord(found[3])]])


def _without_json_names(message: Any) -> None:
    """protoc gives them to plugins; descriptors of Python have them where they are asked for."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _without_json_names(nested)


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "protos" / "tokenpod" / "v1").glob("*.proto"))
)
def test_go_stubs_are_of_the_protos_as_they_are(name):
    """By the descriptor that each has in it, so that this needs no Go."""
    source = (STUBS / "tokenpod" / "v1" / f"{name}.pb.go").read_bytes()
    literal = source[source.index(b'_rawDesc = ""') :].partition(b"\n\n")[0]
    pieces = re.findall(rb'\t"((?:[^"\\]|\\.)*)"', literal)
    made = FileDescriptorProto.FromString(b"".join(_ESCAPE.sub(_byte, each) for each in pieces))
    ours = FileDescriptorProto()
    import_module(f"tokenpod_client.protos.tokenpod.v1.{name}_pb2").DESCRIPTOR.CopyToProto(ours)
    for message in (*made.message_type, *ours.message_type):
        _without_json_names(message)
    assert made == ours, "make them again: gen/go/buf.gen.yaml says how"
