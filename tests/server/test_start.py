"""Starting: what is wrong is said in one line, soon, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.checkpoints.demo import DEMO
from support.pods import prefork
from support.pods.faults import kill, stop
from support.pods.groups import ENV, FLAGS
from support.pods.harness import SERVING, ServerProcess, serve
from support.waiting import wait_for

SECONDS = 60
#: Becomes the program that its arguments name, without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by
#: which root reads what it may not. A child of this process could not drop them: gRPC has threads
#: here, and ends a child that lives on behind its fork.
AS_NOBODY_SPECIAL = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""


def start(
    *flags: str, cwd: Path | None = None, as_nobody_special: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `tokenpod serve` until it ends by itself; on demand, file modes hold for root too."""
    network = ["--hostname", "127.0.0.1", "--port", "0", "--health-port", "0"]
    named = {flag for flag in flags if flag.startswith("--")}
    for flag, value in zip(network[::2], network[1::2], strict=True):
        if flag not in named:
            flags = (*flags, flag, value)
    if not as_nobody_special:
        return prefork.run(["serve", *flags], timeout=SECONDS, cwd=str(cwd) if cwd else None)
    command = [sys.executable, "-P", "-m", "tokenpod", "serve", *flags]
    wrapped = [sys.executable, "-P", "-c", AS_NOBODY_SPECIAL, *command]
    return subprocess.run(wrapped, capture_output=True, text=True, timeout=SECONDS, cwd=cwd)


def one_line(ran: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed start ends with."""
    assert ran.returncode not in (0, -9)
    assert "Traceback" not in ran.stderr
    errors = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ran.stderr
    return errors[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model to spoil."""
    folder = tmp_path / "model with spaces"
    shutil.copytree(DEMO, folder)
    return folder


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])


def endless(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")

    return link


def waiting(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def changed(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (without("config.json"), "config.json"),
        pytest.param(without("model.safetensors"), "safetensors", marks=pytest.mark.slow),
        (without("tokenizer.json"), "tokenizer"),
        (truncated, "model.safetensors"),
        pytest.param(garbage, "model.safetensors", marks=pytest.mark.slow),
        (endless("tokenizer.json"), "tokenizer.json can't be read: it is not a regular file"),
        (endless("tokenizer_config.json"), "tokenizer_config.json can't be read"),
        (waiting("special_tokens_map.json"), "special_tokens_map.json can't be read"),
        (endless("chat_template.jinja"), "chat_template.jinja can't be read"),
        pytest.param(
            changed(architectures=["NoSuchForCausalLM"]),
            "NoSuchForCausalLM",
            marks=pytest.mark.slow,
        ),
        pytest.param(changed(num_hidden_layers=9), "8", marks=pytest.mark.slow),
        pytest.param(changed(hidden_size=250), "embed_tokens", marks=pytest.mark.slow),
        (changed(vocab_size=90_000), "vocabulary 90000: they don't belong together"),
    ],
)
def test_a_broken_checkpoint_is_named(
    model: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(model)
    assert named in one_line(start("--model-id", str(model)))


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    assert "no/such-model" in one_line(start("--model-id", "no/such-model", cwd=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named() -> None:
    line = one_line(start("--device", "cuda", "--model-id", "demo"))
    assert "device is cuda, but" in line


FILES = ("model.safetensors", "tokenizer.json")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (".", "tokenizer_config.json", *FILES)
        ),
    ],
)
def test_a_model_that_cannot_be_read_is_named(model: Path, name: str) -> None:
    spoiled = model / name
    mode = spoiled.stat().st_mode
    spoiled.chmod(0)
    try:
        line = one_line(start("--model-id", str(model), as_nobody_special=True))
    finally:
        spoiled.chmod(mode)
    assert str(model) in line
    assert "can't be read" in line
    assert "Permission denied" in line


def test_an_empty_volume_is_named(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    assert "it is empty, as if its volume were not mounted" in one_line(
        start("--model-id", str(volume))
    )
    line = one_line(start("--model-id", str(volume / "llama" / "8b")))
    assert f"there is no such folder; {volume} is empty, as if" in line


def test_a_folder_where_no_socket_can_be_made_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    ran = start("--uds-path", str(folder / "shard"), as_nobody_special=True)
    assert ran.returncode == 2
    assert f"this user can't write to {folder}" in ran.stderr
    assert "in use" not in ran.stderr


def test_a_port_that_this_user_may_not_have_is_not_called_taken() -> None:
    # Nobody's: it is of a network for documentation.
    line = one_line(start("--hostname", "192.0.2.1", "--port", "18181"))
    assert line == "error: cannot listen on 192.0.2.1:18181: Cannot assign requested address"


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (("--model-id", "/no/such/model"), 1),
        (("--max-best-of", "0"), 2),
        (("--no-such-flag",), 2),
    ],
)
def test_what_ends_a_start_is_json_where_logs_are(flags: tuple[str, ...], status: int) -> None:
    ran = start(*flags, "--json-output")
    assert ran.returncode == status
    (line,) = ran.stderr.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"]) == ("ERROR", "tokenpod")
    assert flags[0] in entry["message"]


def test_a_wrong_flag_is_named() -> None:
    ran = start("--max-best-of", "0")
    assert ran.returncode == 2
    assert "--max-best-of" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("flag", ["--port", "--health-port"])
def test_a_taken_port_is_named(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in one_line(start(flag, str(port)))


def test_two_servers_do_not_share_a_port(server: ServerProcess) -> None:
    assert str(server.port) in one_line(start("--port", str(server.port)))
    assert server.health() == SERVING


def test_a_socket_in_use_is_refused(server: ServerProcess) -> None:
    assert server.uds in one_line(start("--uds-path", server.uds.removesuffix("-0")))
    assert Path(server.uds).exists()


def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "shard-0"
    precious.write_text("mine")
    assert "is not a socket" in one_line(start("--uds-path", str(tmp_path / "shard")))
    assert precious.read_text() == "mine"


def test_a_pool_that_cannot_fit_is_refused_with_its_size() -> None:
    assert "max_batch_total_tokens" in one_line(start("--max-batch-total-tokens", "1000000000"))


def test_the_slots_are_told_with_what_they_were_computed_from() -> None:
    with serve("--memory-fraction", "0.0005") as server:
        assert 'kv_slots_from="0% of the ' in server.log.read_text()


def test_the_log_tells_of_loading_until_it_serves_and_nothing_is_left_in_the_end() -> None:
    with serve(wait=False) as starting:
        wait_for(lambda: bool(starting.engine_pids()))
        # As slow as a large model on a slow volume.
        stop(starting.engine_pid())
        wait_for(lambda: starting.log.read_text().count("loading model_id=demo stage=") == 3)
        os.kill(starting.engine_pid(), signal.SIGCONT)
        starting.wait_until_serving()
        before, _, after = starting.log.read_text().partition("serving")
        assert 'stage="starting the engine"' in before
        assert "loading" not in after
        engine = starting.engine_pid()
        assert starting.stop() == 0
        assert not Path(f"/proc/{engine}").exists()
        assert not Path(starting.uds).exists()


def test_an_engine_that_is_killed_while_it_loads_is_named() -> None:
    with serve(wait=False) as starting:
        wait_for(lambda: bool(starting.engine_pids()))
        kill(starting.engine_pid())
        assert starting.process.wait(SECONDS) == 1
        text = starting.log.read_text()
        assert "error: the engine was killed by SIGKILL, out of memory?" in text
        assert "Traceback" not in text


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named(rank: int) -> None:
    with serve(*FLAGS, "--num-shard", "2", env=ENV) as server:
        kill(server.children()[rank])
        said = f'reason="rank {rank} was killed by SIGKILL, out of memory?"'
        wait_for(lambda: said in server.log.read_text(), log=server.log)


def test_a_stop_while_loading_ends_at_once() -> None:
    with serve(wait=False) as starting:
        # Its child is there: it is past importing, and loads.
        deadline = time.monotonic() + SECONDS
        while not starting.children() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert starting.stop() == 0
