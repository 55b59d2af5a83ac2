"""Engines are started before anything else, with what their processes need from the start."""

from __future__ import annotations

import sys

import pytest

from tokenpod.service.config.sources import load_settings
from tokenpod.service.pod.engine_start import StartedEngine, killed_at_exit, start_engines

pytestmark = pytest.mark.pod
#: In an engine's place: sends its arguments over the last of its links, and waits for ours to end.
SENDS = """
import socket, sys
links = [socket.socket(fileno=int(each)) for each in sys.argv[1:] if each.isdigit()]
links[-1].send(" ".join("fd" if each.isdigit() else each for each in sys.argv[1:]).encode())
links[0].recv(1)
"""
COMMAND = (sys.executable, "-c", SENDS)


def arguments_of(engine: StartedEngine) -> str:
    """The arguments of its process."""
    return (engine.joins or engine.links[-1]).recv(100).decode()


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ({"device": "cpu", "front_ends": 1}, ["fd"]),
        ({"device": "cpu", "front_ends": 3}, ["fd fd fd fd"]),  # and what brings it new links
        ({"device": "cuda", "front_ends": 1}, ["compile fd"]),
        ({"device": "cuda", "num_shard": 2, "front_ends": 1}, ["compile fd", "fd"]),
    ],
)
def test_the_first_engine_has_a_link_for_each_front_end_and_compiles_for_a_gpu(flags, arguments):
    with killed_at_exit(start_engines(load_settings(**flags), COMMAND)) as engines:
        assert [arguments_of(engine) for engine in engines] == arguments
        ranked = "num_shard" in flags
        assert all((engine.control is not None) == ranked for engine in engines)


def test_engines_that_nobody_took_end_with_the_server():
    with killed_at_exit(
        start_engines(load_settings(device="cpu", front_ends=1), COMMAND)
    ) as engines:
        arguments_of(engines[0])
        assert engines[0].process.poll() is None
    assert engines[0].process.poll() is not None
    assert engines[0].links[0].fileno() == -1
