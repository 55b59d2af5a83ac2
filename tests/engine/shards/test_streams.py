"""Leader and followers over real gRPC: who is let in, what arrives, and who is missed."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

import msgspec
import pytest

from support.outside.certificates import make_authority, make_certificate
from support.pods.harness import free_port
from support.waiting import wait_for
from tokenpod.core.errors import EngineError
from tokenpod.core.group_messages import Drain
from tokenpod.core.placement import Placement, ShardTls
from tokenpod.core.plan import PlanRow, StepPlan, plan_of
from tokenpod.core.rank_reads import RankRead
from tokenpod.engine.shards.follower import PlanStream
from tokenpod.engine.shards.leader import PlanServer

FACTS = {"release": "1", "model": "demo"}
SECONDS = 20.0


def placement(rank: int, world: int, plans: str) -> Placement:
    return Placement(
        rank=rank,
        world=world,
        local_rank=rank,
        plans=plans,
        rendezvous="127.0.0.1",
        rendezvous_port=0,
        leader_address="leader:50051",
        secret="ours",
    )


def plan(step: int) -> StepPlan:
    return plan_of(step, [PlanRow(0, step, [step], output=step)])


class Leader:
    def __init__(self, world: int, plans: str, tls: ShardTls | None = None) -> None:
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.drains: SimpleQueue[Drain] = SimpleQueue()
        self.waiting: SimpleQueue[str] = SimpleQueue()
        place = msgspec.structs.replace(placement(0, world, plans), tls=tls)
        self.server = PlanServer(place, FACTS, on_lost=self._lost, on_drain=self.drains.put)

    def serve(self) -> None:
        """Bring up the whole group."""
        self.server.gather(self.waiting.put)
        self.server.form(1234)
        self.server.come_up(100)

    def _lost(self, reason: str, fault: bool) -> None:
        self.lost.put(f"fault: {reason}" if fault else reason)


class Follower:
    #: Those of the test under way.
    live: ClassVar[list[Follower]] = []

    def __init__(self, where: Placement, facts: dict[str, str] | None = None) -> None:
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.drains: SimpleQueue[Drain] = SimpleQueue()
        self.waiting: SimpleQueue[str] = SimpleQueue()
        self.plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self.adapters: list[str] = []
        self.joined: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.stream = PlanStream(
            where, facts or FACTS, on_lost=self._lost, on_drain=self.drains.put
        )
        self.live.append(self)
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        with contextlib.suppress(EngineError):
            self.joined.put(self.stream.join(self.waiting.put))
            self.stream.come_up(100)
            for received in self.stream.plans(self):
                self.plans.put(received)

    def read(self, number: int, name: str, path: str, tell: Callable[[RankRead], None]) -> None:
        self.adapters.append(f"read {number} {name} {path}")
        rank = self.stream._placement.rank
        tell(RankRead(rank, number, "d" * 64, "broken" if rank == 2 else ""))

    def drop(self, number: int) -> None:
        self.adapters.append(f"drop {number}")

    def _lost(self, reason: str, fault: bool) -> None:
        self.lost.put(f"fault: {reason}" if fault else reason)


@pytest.fixture(autouse=True)
def _followers_leave() -> Iterator[None]:
    yield
    while Follower.live:
        Follower.live.pop().stream.close("the test is over")


@pytest.fixture
def address() -> str:
    return f"unix-abstract:tokenpod-test-{secrets.token_hex(8)}"


@pytest.fixture
def start(address: str) -> Iterator[Callable[[int], Leader]]:
    leaders: list[Leader] = []

    def started(world: int) -> Leader:
        leaders.append(Leader(world, address))
        return leaders[-1]

    yield started
    for leader in leaders:
        leader.server.close("the test is over")


def taken(follower: Follower) -> StepPlan:
    received = follower.plans.get(timeout=SECONDS)
    assert received is not None
    return received


def refusal(follower: Follower) -> str:
    return follower.waiting.get(timeout=SECONDS)


def test_followers_get_every_plan_in_order(start: Callable[[int], Leader], address: str) -> None:
    leader = start(3)
    followers = [Follower(placement(rank, 3, address)) for rank in (1, 2)]
    leader.serve()
    for step in range(1, 201):
        leader.server.send_plan(plan(step))
    for follower in followers:
        assert follower.joined.get(timeout=SECONDS) == ("leader:50051", 1234)
        got = [taken(follower) for _ in range(200)]
        assert [one.step for one in got] == list(range(1, 201))
        assert [int(one.r_start[0]) for one in got] == list(range(1, 201))


def test_followers_capture_at_the_leaders_place_among_the_plans(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(3)
    followers = [Follower(placement(rank, 3, address)) for rank in (1, 2)]
    leader.serve()
    leader.server.send_capture()
    leader.server.send_plan(plan(1))
    leader.server.send_plan(plan(2))
    leader.server.send_capture()
    leader.server.send_plan(plan(3))
    for follower in followers:
        got = [follower.plans.get(timeout=SECONDS) for _ in range(5)]
        assert [one and one.step for one in got] == [None, 1, 2, None, 3]


def test_followers_read_and_drop_adapters_in_their_place_among_the_plans(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(3)
    followers = [Follower(placement(rank, 3, address)) for rank in (1, 2)]
    leader.serve()
    assert leader.server.count == 2
    leader.server.read_adapter(4, "sql", "a/b")
    found = [leader.server.reads.get(timeout=SECONDS) for _ in range(2)]
    assert sorted((read.rank, read.number, read.problem) for read in found) == [
        (1, 4, ""),
        (2, 4, "broken"),
    ]
    assert {read.digest for read in found} == {"d" * 64}
    leader.server.send_plan(plan(1))
    leader.server.drop_adapter(4)
    leader.server.send_plan(plan(2))
    for follower in followers:
        assert [taken(follower).step for _ in range(2)] == [1, 2]
        assert follower.adapters == ["read 4 sql a/b", "drop 4"]


def test_heartbeats_tell_how_far_a_follower_is(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(2)
    follower = Follower(placement(1, 2, address))
    leader.serve()
    leader.server.send_plan(plan(1))
    assert leader.server.lag() == 1
    taken(follower)
    follower.stream.beat()
    wait_for(lambda: leader.server.lag() == 0)


def test_a_follower_asks_the_leader_to_drain_and_hears_of_it(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(2)
    follower = Follower(placement(1, 2, address))
    leader.serve()
    follower.stream.send_drain(Drain(0))
    assert leader.drains.get(timeout=SECONDS) == Drain(1)
    leader.server.send_drain(Drain(1))
    assert follower.drains.get(timeout=SECONDS) == Drain(1)
    # A follower that has left hears nothing, and nothing fails.
    leader.server.send_drain(Drain(7))


@pytest.mark.parametrize(
    ("changes", "facts", "said"),
    [
        ({}, {"release": "2", "model": "demo"}, "release is 1 at the leader and 2 at rank 1"),
        ({"world": 4}, FACTS, "it is one of 4 ranks, the leader one of 2"),
        ({"rank": 2}, FACTS, "there is no rank 2 in a group of 2"),
        ({"rank": 0}, FACTS, "there are two leaders"),
        ({"secret": "theirs"}, FACTS, "it belongs to another pod"),
    ],
)
def test_who_differs_is_refused_by_name_on_both_sides(
    start: Callable[[int], Leader],
    address: str,
    changes: dict[str, object],
    facts: dict[str, str],
    said: str,
) -> None:
    leader = start(2)
    threading.Thread(target=leader.serve, daemon=True).start()
    assert leader.waiting.get(timeout=SECONDS) == f"waiting for rank 1 of 2 at {address}"
    stranger = Follower(msgspec.structs.replace(placement(1, 2, address), **changes), facts)
    assert said in refusal(stranger)
    assert said in leader.waiting.get(timeout=SECONDS)
    # What is wrong may be put right: the leader still takes the one it waits for.
    right = Follower(placement(1, 2, address))
    assert right.joined.get(timeout=SECONDS)


def test_who_was_refused_says_so_after_the_leader_has_given_up(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(2)
    follower = Follower(placement(1, 2, address), FACTS | {"model": "other"})
    refused = refusal(follower)
    leader.server.close("nobody came in time")
    later = refusal(follower)
    assert later.startswith(f"waiting for the leader at {address}: ")
    assert later.endswith(f"; before, {refused}")


def test_a_rank_that_is_there_twice_is_refused(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(3)
    threading.Thread(target=leader.serve, daemon=True).start()
    first = Follower(placement(1, 3, address))
    assert refusal(first) == "waiting for the other ranks of 3"
    assert "rank 1 is here already" in refusal(Follower(placement(1, 3, address)))


def test_who_waits_for_a_leader_can_be_told_to_leave(address: str) -> None:
    follower = Follower(placement(1, 2, address))
    assert follower.waiting.get(timeout=SECONDS)
    follower.stream.close("its pod stops")
    follower.thread.join(SECONDS)
    assert not follower.thread.is_alive()
    assert follower.joined.empty()


def test_a_leader_that_is_not_there_yet_is_waited_for(
    start: Callable[[int], Leader], address: str
) -> None:
    follower = Follower(placement(1, 2, address))
    assert f"waiting for the leader at {address}: " in refusal(follower)
    start(2).serve()
    assert follower.joined.get(timeout=SECONDS)


def test_a_wrong_address_is_named() -> None:
    where = f"127.0.0.1:{free_port()}"
    said = refusal(Follower(placement(1, 2, where)))
    assert said == f"waiting for the leader at {where}: nobody listens there"


def test_two_leaders_cannot_have_one_address(address: str) -> None:
    where = f"127.0.0.1:{free_port()}"
    first = Leader(2, where)
    with pytest.raises(EngineError, match=where):
        Leader(2, where)
    first.server.close("the test is over")


def test_before_the_group_forms_a_follower_may_come_and_go(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(3)
    threading.Thread(target=leader.serve, daemon=True).start()
    assert "rank 1, 2 of 3" in leader.waiting.get(timeout=SECONDS)
    first = Follower(placement(1, 3, address))
    assert "rank 2 of 3" in leader.waiting.get(timeout=SECONDS)
    first.stream.close("it goes again")
    assert "rank 1, 2 of 3" in leader.waiting.get(timeout=SECONDS)
    followers = [Follower(placement(rank, 3, address)) for rank in (1, 2)]
    assert all(follower.joined.get(timeout=SECONDS) for follower in followers)
    assert leader.lost.empty()


def test_a_follower_that_leaves_a_formed_group_is_missed_once(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(3)
    followers = [Follower(placement(rank, 3, address)) for rank in (1, 2)]
    leader.serve()
    followers[1].stream.close("out of memory")
    assert leader.lost.get(timeout=SECONDS) == "rank 2 was lost: out of memory"
    followers[0].stream.close("me too")
    time.sleep(0.2)
    assert leader.lost.empty()


def test_a_fault_of_a_follower_is_told_as_one_to_all(
    start: Callable[[int], Leader], address: str
) -> None:
    leader = start(3)
    followers = [Follower(placement(rank, 3, address)) for rank in (1, 2)]
    leader.serve()
    followers[0].stream.close("no memory", fault=True)
    told = leader.lost.get(timeout=SECONDS)
    assert told == "fault: rank 1 failed: no memory"
    leader.server.close(told, fault=True)
    assert followers[1].lost.get(timeout=SECONDS) == "fault: " + told


def test_a_silent_follower_is_missed(start: Callable[[int], Leader], address: str) -> None:
    leader = start(2)
    Follower(placement(1, 2, address))
    leader.serve()
    leader.server.silence.tick(0.2)
    leader.server.miss(1, 0.2)
    assert leader.lost.get(timeout=SECONDS) == "rank 1 was lost: it has not been heard for 0.2 s"


def test_a_leader_that_leaves_says_why(start: Callable[[int], Leader], address: str) -> None:
    leader = start(2)
    follower = Follower(placement(1, 2, address))
    leader.serve()
    leader.server.close("rank 7 was lost")
    assert follower.lost.get(timeout=SECONDS) == "rank 7 was lost"


def test_pools_that_differ_are_refused(start: Callable[[int], Leader], address: str) -> None:
    leader = start(2)
    Follower(placement(1, 2, address))
    leader.server.gather(leader.waiting.put)
    leader.server.form(1)
    with pytest.raises(EngineError, match="rank 1 has 100 KV slots, rank 0 has 99"):
        leader.server.come_up(99)


def test_a_gap_in_the_plans_is_an_error(start: Callable[[int], Leader], address: str) -> None:
    leader = start(2)
    where = placement(1, 2, address)
    stream = PlanStream(where, FACTS, on_lost=print, on_drain=print)
    threading.Thread(target=leader.serve, daemon=True).start()
    stream.join(lambda text: None)
    stream.come_up(100)
    leader.server.send_plan(plan(1))
    leader.server._plans += 1
    leader.server.send_plan(plan(3))
    plans = stream.plans(Follower.__new__(Follower))
    assert next(plans).step == 1
    with pytest.raises(EngineError, match="plan 3 came after plan 1"):
        next(plans)


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pems")
    for authority, name in (("ca", "pod"), ("stranger", "intruder")):
        make_authority(folder, authority)
        make_certificate(folder, name, authority)
    return folder


def tls(pems: Path, name: str, authority: str = "ca") -> ShardTls:
    files = (pems / f"{name}.pem", pems / f"{name}.key", pems / f"{authority}.pem")
    return ShardTls(*map(str, files))


@pytest.mark.parametrize("theirs", ["none", "intruder"])
@pytest.mark.pod
def test_certificates_let_in_the_groups_own_pods_alone(pems: Path, theirs: str) -> None:
    where = f"127.0.0.1:{free_port()}"
    leader = Leader(2, where, tls(pems, "pod"))
    threading.Thread(target=leader.serve, daemon=True).start()
    stranger = placement(1, 2, where)
    if theirs == "intruder":
        stranger = msgspec.structs.replace(stranger, tls=tls(pems, "intruder"))
    assert f"waiting for the leader at {where}: " in refusal(Follower(stranger))
    right = Follower(msgspec.structs.replace(stranger, tls=tls(pems, "pod")))
    assert right.joined.get(timeout=SECONDS)
    leader.server.close("the test is over")


@pytest.mark.pod
def test_a_leader_that_followers_can_not_trust_is_not_joined(pems: Path) -> None:
    where = f"127.0.0.1:{free_port()}"
    leader = Leader(2, where, tls(pems, "intruder", "stranger"))
    place = msgspec.structs.replace(placement(1, 2, where), tls=tls(pems, "pod"))
    assert f"waiting for the leader at {where}: " in refusal(Follower(place))
    leader.server.close("the test is over")


@pytest.mark.pod
def test_a_file_that_can_not_be_read_is_named(pems: Path) -> None:
    place = placement(0, 2, f"127.0.0.1:{free_port()}")
    missing = msgspec.structs.replace(place, tls=ShardTls(str(pems / "none"), "", ""))
    with pytest.raises(EngineError, match="none: No such file"):
        PlanServer(missing, FACTS, on_lost=print, on_drain=print)


@pytest.mark.pod
def test_a_file_that_is_no_certificate_is_said_to_be_wrong(pems: Path) -> None:
    (pems / "garbage.pem").write_text("x")
    (pems / "garbage.key").write_text("x")
    place = placement(0, 2, f"127.0.0.1:{free_port()}")
    wrong = msgspec.structs.replace(place, tls=tls(pems, "garbage"))
    with pytest.raises(EngineError, match="--shard-tls-cert"):
        PlanServer(wrong, FACTS, on_lost=print, on_drain=print)
