"""Ranks find each other, compute together, and say in one line what keeps them apart.

Ranks are threads here: what they share is the sockets. tests/models/test_ranks.py has processes.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.pods.harness import free_port
from tokenpod.core.errors import EngineError
from tokenpod.engine.shards.join import join_group

CPU = torch.device("cpu")
HERE = "127.0.0.1"


def together(world, act, *, timeout=20.0, ranks=None):
    """What `act(group)` returns on every rank, or what was raised."""
    port = free_port()

    def run(rank):
        try:
            group = join_group(rank, world, HERE, port, device=CPU, timeout=timeout)
        except EngineError as error:
            return error
        try:
            return act(group)
        except EngineError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(world + 1) as pool:
        return list(pool.map(run, range(world) if ranks is None else ranks))


def assert_one_line(error, *words):
    assert isinstance(error, EngineError)
    assert "\n" not in str(error)
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("tokens", [5, 2000], ids=["short", "long"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_the_same_on_every_rank(world, dtype, tokens):
    torch.manual_seed(0)
    shares = torch.randn(world, tokens, 33).to(dtype)
    residual = torch.randn(tokens, 33).to(dtype)

    def act(group):
        x, stream = shares[group.rank].clone(), residual.clone()
        group.sum(x)
        group.add(shares[group.rank].clone(), stream)
        return x, stream

    first, *others = together(world, act)
    tolerance = 0 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(first[0], shares.sum(0), rtol=tolerance, atol=1e-5 + tolerance)
    torch.testing.assert_close(first[1], first[0] + residual, rtol=tolerance, atol=tolerance)
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


def test_columns_are_gathered_in_the_order_of_ranks():
    def act(group):
        return group.gather(torch.arange(6.0).view(2, 3) + 10 * group.rank)

    for got in together(3, act):
        assert got.tolist() == [
            [0, 1, 2, 10, 11, 12, 20, 21, 22],
            [3, 4, 5, 13, 14, 15, 23, 24, 25],
        ]


def test_the_leaders_tokens_reach_everybody():
    def act(group):
        tokens = torch.tensor([5, -1, 1 << 40]) if group.rank == 0 else torch.zeros(3).long()
        group.broadcast(tokens)
        return tokens.tolist()

    assert together(3, act) == [[5, -1, 1 << 40]] * 3


def test_ranks_agree_on_the_least_number():
    assert together(3, lambda group: group.least(40 - group.rank)) == [38, 38, 38]


def test_ranks_of_one_host_know_how_many_they_are():
    assert together(2, lambda group: group.local_ranks) == [2, 2]


def test_a_lost_rank_ends_the_others_collective():
    def act(group):
        if group.rank == 1:
            return None
        time.sleep(0.1)
        group.sum(torch.zeros(4, 4))
        return None

    lost, _ = together(2, act)
    assert_one_line(lost, "rank 0 lost its group of 2")


def test_who_does_not_come_is_named():
    first, third = together(3, lambda group: None, timeout=1.0, ranks=[0, 2])
    assert_one_line(first, "rank 1 of 3 did not come")
    # The other hears it from the store, or finds that rank 0 has gone.
    assert_one_line(third, "rank")


def test_nobody_listens():
    port = free_port()
    with pytest.raises(EngineError, match=f"rank 1 can't reach rank 0 at {HERE}:{port}: ") as error:
        join_group(1, 2, HERE, port, device=CPU, timeout=0.5)
    assert_one_line(error.value, "refused")


def test_a_name_that_nobody_has():
    with pytest.raises(EngineError, match=r"can't reach rank 0 at nowhere\.invalid:1: ") as error:
        join_group(1, 2, "nowhere.invalid", 1, device=CPU, timeout=0.3)
    assert_one_line(error.value)


def test_a_port_that_is_taken():
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"rank 0 can't listen at {HERE}:{port}: ") as error:
            join_group(0, 2, HERE, port, device=CPU, timeout=1.0)
    assert_one_line(error.value)


def test_ranks_that_disagree_about_the_world():
    port = free_port()

    def run(rank, world):
        with pytest.raises(EngineError) as error:
            join_group(rank, world, HERE, port, device=CPU, timeout=2.5)
        return error.value

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (0, 1), (2, 4))
    assert_one_line(second, "rank 1 is one of 4", "leads a group of 2")
    assert_one_line(first, "rank 1 of 2 did not come")


def test_two_processes_that_claim_one_rank():
    answers = together(3, lambda group: None, timeout=2.5, ranks=[0, 1, 1])
    assert any("two processes say that they are rank 1" in str(answer) for answer in answers)


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (2, 2), (-1, 2)])
def test_a_rank_that_cannot_be(rank, world):
    with pytest.raises(EngineError, match=f"rank {rank} of {world}"):
        join_group(rank, world, HERE, 1, device=CPU, timeout=1.0)
