"""The counters that the front ends of a pod share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.calls.errors import ResourceExhausted, Unavailable

JOINED = """
import sys
from tokenpod.service.admission.counters import PodCounters
counters = PodCounters.join(int(sys.argv[1]), 1, 3)
counters.add(requests=int(sys.argv[2]), waiting_tokens=50)
counters.set_serving()
print(counters.requests, counters.closed)
"""


def joined(counters: PodCounters, requests: int) -> str:
    """What another process sees that has joined with so many requests."""
    assert counters.descriptor is not None
    command = [sys.executable, "-P", "-c", JOINED, str(counters.descriptor), str(requests)]
    return subprocess.run(
        command, pass_fds=[counters.descriptor], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.pod
def test_processes_see_what_the_others_have() -> None:
    counters = PodCounters.create(3)
    counters.add(requests=2, waiting_tokens=10)
    assert joined(counters, 5) == "7 False"
    assert (counters.requests, counters.waiting_tokens) == (7, 60)
    counters.close()
    assert joined(counters, -1) == "6 True"


@pytest.mark.pod
def test_all_serve_once_each_of_the_others_has_said_so() -> None:
    counters = PodCounters.create(3)
    assert not counters.all_serving
    joined(counters, 0)
    assert not counters.all_serving
    PodCounters.join(counters.descriptor or -1, 2, 3).set_serving()
    assert counters.all_serving
    assert PodCounters.create(1).all_serving


@pytest.mark.pod
def test_a_process_that_is_gone_leaves_no_requests() -> None:
    counters = PodCounters.create(3)
    counters.add(requests=1)
    joined(counters, 5)
    counters.forget(1)
    assert (counters.requests, counters.waiting_tokens) == (1, 0)


def test_each_process_has_heartbeats_of_its_own_and_a_new_one_begins_at_none() -> None:
    counters = PodCounters.create(3)
    others = [PodCounters.join(counters.descriptor or -1, index, 3) for index in (1, 2)]
    for other in (others[0], others[1], others[1]):
        other.beat()
        other.set_serving()
    assert [counters.beats(index) for index in range(3)] == [0, 1, 2]
    counters.forget(2)
    assert [counters.beats(index) for index in range(3)] == [0, 1, 0]
    assert [counters.serves(index) for index in (1, 2)] == [True, False]


def test_one_process_alone_needs_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    counters = PodCounters.create(1)
    counters.add(requests=3, waiting_tokens=4)
    assert (counters.requests, counters.waiting_tokens, counters.descriptor) == (3, 4, None)
    assert len(os.listdir("/proc/self/fd")) == before


def two_front_ends() -> tuple[Admission, Admission]:
    counters = PodCounters.create(2)
    other = PodCounters.join(counters.descriptor or -1, 1, 2)
    made = [Admission(max_requests=2, max_queue_tokens=100, counters=h) for h in (counters, other)]
    for admission in made:
        admission.closed = None
    return made[0], made[1]


def test_limits_are_the_pods_whichever_front_end_a_request_reaches() -> None:
    one, two = two_front_ends()
    with one.enter() as place:
        place.queue(80)
        with two.enter() as late:
            with pytest.raises(ResourceExhausted, match="80 prompt tokens are waiting"):
                late.queue(30)
            for full in (one, two):
                with pytest.raises(ResourceExhausted, match="2 requests"), full.enter():
                    pass
    assert (one.counters.requests, two.counters.waiting_tokens) == (0, 0)


def test_a_drain_closes_every_front_end() -> None:
    one, two = two_front_ends()
    one.drain()
    for closed in (one, two):
        with pytest.raises(Unavailable, match="draining"):
            closed.check_open()
