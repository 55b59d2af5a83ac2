"""Ranks that are killed, stopped or cut off: calls fail soon, and the group starts again."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.pods.faults import (
    NOT_SERVING_SECONDS,
    PROMPT,
    TOLD_SECONDS,
    Call,
    Seen,
    Wire,
    engines,
    kill,
    stop,
    table,
    try_fault,
)
from support.pods.groups import ENV, FLAGS, Group, gone, pod
from support.pods.harness import SERVING, ServerProcess, free_port, serve
from support.waiting import wait_for

#: A test run's machine is busy: limits that a quiet one keeps are tested by the slow run.
SLACK = 3.0
#: Steps of a prompt are many, so that a fault finds one under way.
SLOW_PREFILL = ("--max-batch-prefill-tokens", "8")


def soon(seen: Seen, slack: float = SLACK) -> None:
    assert seen.not_serving < NOT_SERVING_SECONDS + slack
    if seen.told is not None:
        assert seen.told < TOLD_SECONDS + slack


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.fixture(scope="module")
def one_pod() -> Iterator[ServerProcess]:
    with serve(*FLAGS, *SLOW_PREFILL, "--num-shard", "2", env=ENV) as running:
        yield running
        assert running.stop() == 0


@contextlib.contextmanager
def wired_pods(*flags: str) -> Iterator[tuple[Group, Wire]]:
    """Two pods, with a wire between them that can be cut."""
    master, plans = free_port(), free_port()
    wire = Wire(plans)
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        leader = stack.enter_context(pod(0, 2, master, plans, *flags))
        follower = stack.enter_context(pod(1, 2, master, wire.port, *flags))
        group = Group([leader, follower])
        group.wait_until_serving()
        yield group, wire


@pytest.fixture(scope="module")
def two_pods() -> Iterator[tuple[Group, Wire]]:
    with wired_pods() as made:
        yield made
        assert [server.stop() for server in reversed(made[0].pods)] == [0, 0]


@pytest.mark.parametrize(
    ("strike", "rank", "phase"),
    [
        (kill, 1, "decode"),
        pytest.param(stop, 1, "idle", marks=pytest.mark.slow),
        pytest.param(kill, 0, "prefill", marks=pytest.mark.slow),
        (stop, 0, "decode"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_pod_whose_rank_is_lost_says_so_and_serves_again(
    one_pod: ServerProcess, strike: Callable[[int], None], rank: int, phase: str
) -> None:
    before = engines(one_pod)
    soon(try_fault(one_pod, lambda: strike(before[rank]), phase))
    assert all(gone(pid) for pid in before)
    assert one_pod.health("liveness") == SERVING


def test_a_rank_lost_while_the_group_forms_does_not_matter(one_pod: ServerProcess) -> None:
    def twice() -> None:
        first = engines(one_pod)
        kill(first[0])
        wait_for(lambda: len(set(engines(one_pod)) - set(first)) == 2)
        kill(engines(one_pod)[1])

    soon(try_fault(one_pod, twice, "idle"))


@pytest.mark.slow
def test_a_cut_connection_is_seen_at_both_ends(two_pods: tuple[Group, Wire]) -> None:
    group, wire = two_pods

    def cut() -> None:
        wire.cut()
        wait_for(lambda: group.pods[1].health("") != SERVING)
        wire.restore()

    soon(try_fault(group.leader, cut, "decode"))
    wait_for(lambda: group.pods[1].health("") == SERVING)


@pytest.mark.slow
def test_a_connection_that_only_seems_open_is_seen_at_both_ends(
    two_pods: tuple[Group, Wire],
) -> None:
    group, wire = two_pods

    def hang() -> None:
        wire.hang()
        wait_for(lambda: all(server.health("") != SERVING for server in group.pods))
        wire.restore()

    soon(try_fault(group.leader, hang, "decode"))
    wait_for(lambda: group.pods[1].health("") == SERVING)


@pytest.mark.slow
def test_a_pause_that_nobody_minds_loses_nothing(one_pod: ServerProcess) -> None:
    before = engines(one_pod)
    call = Call(one_pod, PROMPT, 200)
    call.wait_for_token()
    for pid in before:
        stop(pid)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
    call.seconds(0.0)
    assert call.code is None
    assert engines(one_pod) == before


@pytest.mark.slow
def test_a_whole_pod_that_was_stopped_returns(two_pods: tuple[Group, Wire]) -> None:
    leader, follower = two_pods[0].pods
    stopped = [follower.process.pid, *engines(follower)]

    def pause() -> None:
        for pid in stopped:
            stop(pid)
        wait_for(lambda: leader.health("") != SERVING)
        time.sleep(1.0)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    soon(try_fault(leader, pause, "decode"))


@pytest.mark.slow
def test_further_front_ends_serve_again_too() -> None:
    with serve(*FLAGS, "--num-shard", "2", "--front-ends", "2", env=ENV) as server:
        for rank in (1, 0):
            ranks = [pid for pid in server.children() if "engine" in command(pid)]
            soon(try_fault(server, lambda pid=ranks[rank]: kill(pid), "decode"))
        assert len(server.front_end_pids()) == 1
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_faults_in_a_row() -> None:
    """Every fault of every rank in every phase, in one pod and in two, again and again."""
    seen: dict[str, list[Seen]] = defaultdict(list)
    cases = list(itertools.product((kill, stop), (0, 1), ("idle", "prefill", "decode")))
    with serve(*FLAGS, *SLOW_PREFILL, "--num-shard", "2", env=ENV) as server:
        rounds = random.Random(1).sample(cases * 5, 60)
        for strike, rank, phase in rounds:
            pid = engines(server)[rank]
            name = f"{strike.__name__} rank {rank}, {phase}"
            seen[name].append(try_fault(server, lambda s=strike, p=pid: s(p), phase))
        assert server.stop() == 0
    with wired_pods(*SLOW_PREFILL) as (group, wire):
        wired = list(itertools.product((wire.cut, wire.hang), ("idle", "prefill", "decode"))) * 4
        for strike, phase in wired:
            seen[f"{strike.__name__} the wire, {phase}"].append(
                try_fault(group.leader, _restored(strike, wire), phase)
            )
        for strike, rank, phase in random.Random(2).sample(cases * 2, 16):
            pid = engines(group.pods[rank])[0]
            name = f"{strike.__name__} pod {rank}, {phase}"
            seen[name].append(try_fault(group.leader, lambda s=strike, p=pid: s(p), phase))
        for server in reversed(group.pods):
            assert server.stop() == 0
    print("\n" + table(seen))
    assert sum(map(len, seen.values())) == 100
    for trials in seen.values():
        for trial in trials:
            soon(trial, slack=0.5)


def _restored(strike: Callable[[], None], wire: Wire) -> Callable[[], None]:
    """Strike, and restore the connection 4 s later, whatever happens meanwhile."""

    def struck() -> None:
        strike()
        threading.Timer(4.0, wire.restore).start()

    return struck
