"""Preemption never changes a request's tokens: through the engine's loop, with the demo model.

The logic is exact where arithmetic is: with every token computed by itself the outputs are the same
bit for bit. What rounding changes on the fast operations is in test_numerics.py.
"""

from __future__ import annotations

import pytest

from support.checkpoints.demo import DEMO
from support.engines.demo_engine import (
    GREEDY,
    PENALISED,
    SAMPLED,
    TOLERANCE,
    Recorder,
    exact_model,
    requests,
    routed,
    serve,
)
from support.pods.harness import free_port
from support.steps import ranks
from support.steps.ranks import Job
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.scheduler.policies.optimistic import Optimistic
from tokenpod.scheduler.policies.past_future import PastFuture

pytestmark = pytest.mark.compute


@pytest.fixture(scope="module")
def exact():
    return exact_model()


@pytest.fixture(scope="module")
def undisturbed(exact):
    link, _ = serve(exact, Recorder(requests(), routed()), rows=17, prefill=64, overlap=False)
    return link


@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
def test_tokens_are_the_same_bit_by_bit_with_and_without_preemptions(exact, undisturbed, overlap):
    link = Recorder(requests(), routed())
    # Few rows, and pieces of prompts: sequences are preempted in the middle of a prompt, too.
    got, preempted = serve(exact, link, rows=9, prefill=8, overlap=overlap, preempt=0.3)
    assert preempted > 30
    assert got.tokens == undisturbed.tokens
    assert got.logprobs == undisturbed.logprobs
    assert got.tops == undisturbed.tops
    assert got.scored == undisturbed.scored != {}


@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
def test_tokens_are_the_same_bit_by_bit_if_what_is_preempted_is_swapped(
    exact, undisturbed, overlap
):
    link, shape = Recorder(requests(), routed()), {"rows": 9, "prefill": 8, "offload_slots": 1200}
    got, preempted = serve(exact, link, overlap=overlap, preempt=0.3, **shape)
    assert preempted > 30
    assert got.load.swapped_tokens > 200
    assert got.load.fetched_tokens > 200
    assert got.tokens == undisturbed.tokens
    assert got.logprobs == undisturbed.logprobs
    assert got.tops == undisturbed.tops
    assert got.scored == undisturbed.scored != {}


@pytest.mark.parametrize("admission", [Optimistic, PastFuture])
def test_tokens_are_the_same_where_memory_runs_out(exact, undisturbed, admission):
    def short(table, limits, quantum):
        made = admission(table, limits, quantum)
        if admission is PastFuture:
            # Those before are taken to have ended at once, so that too many are let in.
            for _ in range(200):
                made._lengths.add(1)
        return made

    link = Recorder(requests(), routed())
    got, _ = serve(exact, link, rows=17, prefill=8, overlap=True, slots=116, admission=short)
    assert got.load.preemptions >= 3
    assert got.tokens == undisturbed.tokens
    assert got.logprobs == undisturbed.logprobs
    assert got.tops == undisturbed.tops
    assert got.scored == undisturbed.scored


def test_a_sequence_that_is_preempted_at_every_step_gets_on(exact, undisturbed):
    # With overlap each life settles one token at least: the step that was in flight.
    only = [request for request in requests() if request.sequence_ids == [2]]
    got, preempted = serve(exact, Recorder(only), rows=9, prefill=64, overlap=True, preempt=1.0)
    assert preempted >= 8
    assert got.tokens[2] == undisturbed.tokens[2]


# -- ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host_kv_bytes",
    [
        pytest.param(0, id="computed again", marks=pytest.mark.slow),
        pytest.param(1 << 22, id="swapped"),
    ],
)
@pytest.mark.pod
def test_two_ranks_preempt_as_one_does(host_kv_bytes):
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cpu",
        threads=1,
        max_batch_size=6,
        max_batch_prefill_tokens=16,
        max_total_tokens=80,
        host_kv_bytes=host_kv_bytes,
    )
    asked = [
        Request([1], list(range(5, 30)), GREEDY, StoppingParams(8), logprobs=True),
        Request([2, 3], list(range(50, 61)), SAMPLED, StoppingParams(8), logprobs=True),
        Request([4], list(range(70, 73)), PENALISED, StoppingParams(8), logprobs=True),
    ]
    port = free_port()
    jobs = [
        Job(rank, [(2, port, [str(DEMO)])], asked, options, dtype="float32", preempt=0.2)
        for rank in range(2)
    ]
    leader, follower = (said[0][0] for said in ranks.run(jobs))
    alone = ranks.answer(DEMO, asked, options, dtype="float32")
    assert leader.preemptions > 5
    assert leader.preemptions == follower.preemptions
    assert leader.fetched == follower.fetched
    assert (leader.fetched > 20) == (host_kv_bytes > 0)
    assert leader.tokens == follower.tokens == dict(alone.tokens)
    for sequence, logprobs in alone.logprobs.items():
        assert leader.logprobs[sequence] == pytest.approx(logprobs, abs=TOLERANCE)
