"""The examples run as their readers would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.clients.public_api import generate, text_request

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "class Stack:\n    def "


@pytest.fixture
def expected(stub) -> str:
    """What an example prints: the greedy text, and how it ended."""
    stream = generate(stub, text_request(PROMPT, stopping={"max_new_tokens": 32}))
    finished = stream.samples[0].finished
    assert finished.text
    return f"{finished.text}\n[{finished.generated_token_count} tokens; FINISH_REASON_LENGTH]\n"


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


@pytest.mark.parametrize("folder", ["node", "typescript"])
def test_npms_locks_pin_checksums_and_name_no_registry(folder):
    lock = (ROOT / "examples" / folder / "package-lock.json").read_text()
    packages = json.loads(lock)["packages"]
    installed = {name: package for name, package in packages.items() if name}
    assert installed
    assert all(package["integrity"].startswith("sha512-") for package in installed.values())
    assert not [name for name, package in installed.items() if "resolved" in package]


@pytest.mark.parametrize(
    "page", ["README.md", "client/README.md", "docs/clients.md", "docs/constraints.md"]
)
def test_what_pages_say_of_the_client_runs(server, page):
    """As it stands, but for the address."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    found = [block for block in blocks if "tokenpod_client" in block]
    assert found
    for code in found:
        here, addresses = re.subn(r'Client\("[^"]+"\)', f'Client("{server.address}")', code)
        assert addresses == 1
        done = run(sys.executable, "-P", "-c", here)
        assert done.returncode == 0, done.stderr
        assert done.stdout
