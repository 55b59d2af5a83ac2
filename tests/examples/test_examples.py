"""The README's clients, run against a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def fibonacci(n):\n"


def test_the_python_client_streams(server: ServerProcess) -> None:
    command = [sys.executable, "-P", "examples/python/generate.py", server.address, PROMPT]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.endswith("[FINISH_LENGTH]\n")
    assert len(ran.stdout) > 30


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node client")
    for name in ("generate.js", "package.json", "package-lock.json", ".npmrc"):
        shutil.copy(ROOT / "examples/node" / name, folder)
    install = ["npm", "ci", "--prefer-offline", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=folder, capture_output=True, timeout=240, check=True)
    return folder / "generate.js"


def node(client: Path, address: str) -> subprocess.CompletedProcess[str]:
    proto = ROOT / "protos/generate/v3/generate.proto"
    return subprocess.run(
        ["node", str(client), address, PROMPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TOKENPOD_PROTO": str(proto)},
    )


def test_the_node_client_streams_the_same_text(server: ServerProcess, node_client: Path) -> None:
    command = [sys.executable, "-P", "examples/python/generate.py", server.address, PROMPT]
    python = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert node(node_client, server.address).stdout == python.stdout


def test_the_node_client_reports_an_error(node_client: Path) -> None:
    ran = node(node_client, "127.0.0.1:1")
    assert ran.returncode == 1
    assert ran.stderr.startswith("UNAVAILABLE: ")
