"""The examples run as their readers would run them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import generate, text_request

ROOT = Path(__file__).resolve().parents[2]
NODE = ROOT / "examples" / "node"
PROMPT = "class Stack:\n    def "


@pytest.fixture
def expected(stub) -> str:
    """What an example prints: the greedy text, and how it ended."""
    stream = generate(stub, text_request(PROMPT, stopping={"max_new_tokens": 32}))
    finished = stream.samples[0].finished
    assert finished.text
    return f"{finished.text}\n[{finished.usage.generated_tokens} tokens; FINISH_REASON_LENGTH]\n"


@pytest.fixture(scope="session")
def node(tmp_path_factory) -> list[str]:
    """The command of the Node example, installed from its lock in a copy of the examples."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "protos", copy / "protos")
    folder = copy / "examples" / "node"
    shutil.copytree(NODE, folder, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "ci", "--prefer-offline", "--ignore-scripts"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return ["node", str(folder / "generate.js")]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_python_streams_a_completion(server, expected):
    script = ROOT / "examples" / "python" / "generate.py"
    done = run(sys.executable, "-P", str(script), server.address, PROMPT)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_python_streams_two_completions_at_once(server, expected):
    script = ROOT / "examples" / "python" / "generate_async.py"
    done = run(sys.executable, "-P", str(script), server.address, PROMPT)
    assert (done.returncode, done.stdout) == (0, 2 * expected), done.stderr


def test_node_streams_a_completion(server, node, expected):
    done = run(*node, server.address, PROMPT)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_node_says_why_a_request_was_refused(server, node):
    done = run(*node, server.address, "")
    assert done.returncode == 1
    assert done.stderr.startswith("INVALID_ARGUMENT: text is empty")


def checkout(folder: Path, language: str) -> Path:
    """A copy of an example and of the protos, with nothing that was built."""
    shutil.copytree(ROOT / "protos", folder / "protos")
    copy = folder / "examples" / language
    built = shutil.ignore_patterns("gen", "target")
    shutil.copytree(ROOT / "examples" / language, copy, ignore=built)
    return copy


def build(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def needs(*programs: str) -> None:
    if lacking := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{lacking[0]} is not installed")


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_go_streams_a_completion(server, expected, tmp_path):
    needs("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    folder = checkout(tmp_path, "go")
    # The command stands in the example.
    head = (folder / "main.go").read_text().partition("package main")[0]
    lines = [line.removeprefix("//").strip() for line in head.splitlines()]
    said = " ".join(line.rstrip("\\") for line in lines if "-" in line and "proto" in line)
    build(folder, "sh", "-c", said[said.index("protoc ") :])
    build(folder, "go", "build", "-o", "example", ".")
    done = run(str(folder / "example"), server.address, PROMPT)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    refused = run(str(folder / "example"), server.address, "")
    assert refused.returncode == 1
    assert refused.stderr.startswith("InvalidArgument: text is empty")


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_java_streams_a_completion(server, expected, tmp_path):
    needs("mvn", "javac")
    folder = checkout(tmp_path, "java")
    build(folder, "mvn", "-q", "-B", "compile")
    arguments = f"-Dexec.args={server.address} '{PROMPT}'"
    done = subprocess.run(
        ["mvn", "-q", "-B", "exec:java", arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_rust_streams_a_completion(server, expected, tmp_path):
    needs("cargo", "protoc")
    folder = checkout(tmp_path, "rust")
    build(folder, "cargo", "build", "--locked", "--quiet")
    program = str(folder / "target" / "debug" / "generate")
    done = run(program, server.address, PROMPT)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    refused = run(program, server.address, "")
    assert refused.returncode == 1
    assert refused.stderr.startswith("InvalidArgument: text is empty")


def test_the_node_lock_pins_checksums_and_names_no_registry():
    packages = json.loads((NODE / "package-lock.json").read_text())["packages"]
    installed = {name: package for name, package in packages.items() if name}
    assert installed
    assert all(package["integrity"].startswith("sha512-") for package in installed.values())
    assert not [name for name, package in installed.items() if "resolved" in package]


@pytest.mark.parametrize("page", ["client/README.md", "docs/clients.md", "docs/constraints.md"])
def test_what_pages_say_of_the_client_runs(server, page):
    """As it stands, but for the address."""
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    assert found
    for code in found:
        here, addresses = re.subn(r'Client\("[^"]+"\)', f'Client("{server.address}")', code)
        assert addresses == 1
        done = run(sys.executable, "-P", "-c", here)
        assert done.returncode == 0, done.stderr
        assert done.stdout
