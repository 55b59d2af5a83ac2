"""Executors of GPUs in a group: steps under way, captured, greedy and drawn, say what one says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support.pods.harness import free_port
from support.steps import ranks, step_scenes
from support.steps.led_ranks import LedJob, LedSaid, led
from support.steps.rank_processes import run_ranks
from support.steps.ranks import Job, Said
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams

OPTIONS = EngineOptions(
    model_folder="",
    dtype=None,
    device="cpu",
    threads=1,
    max_batch_size=2,
    max_batch_prefill_tokens=8,
    max_total_tokens=24,
    max_batch_total_tokens=80,
)
#: Sizes of steps that are captured later: 1, 2 and 4 rows that decode, and 16 tokens.
MORE_ROWS = msgspec.structs.replace(OPTIONS, max_batch_size=8, max_batch_prefill_tokens=16)
SAMPLED = SamplingParams(do_sample=True, temperature=1.2, seed=3)


def requests() -> list[Request]:
    """One draws, and another is greedy on; a scored prompt runs kernel by kernel."""
    drawn, greedy = (StoppingParams(max_new_tokens=count) for count in (2, 3))
    return [
        Request([1], [9, 4, 7], SAMPLED, drawn, logprobs=True, top_n_tokens=2),
        Request([2], [5, 6, 2, 1], SamplingParams(), greedy, logprobs=True, prompt_logprobs=True),
    ]


@pytest.fixture(scope="module")
def folder(shared) -> Path:
    return step_scenes.small_model(shared)


@pytest.mark.slow
def test_ranks_together_say_what_the_host_says(folder):
    port = free_port()
    jobs = [
        Job(rank, [(2, port, [str(folder)])], requests(), OPTIONS, interpreted=True)
        for rank in range(2)
    ]
    (((leader,),), ((follower,),)) = ranks.run(jobs)
    expected: Said = ranks.answer(folder, requests(), OPTIONS)
    assert leader.tokens == follower.tokens == dict(expected.tokens)
    assert leader.tops == dict(expected.tops)
    for sequence, logprobs in expected.logprobs.items():
        assert leader.logprobs[sequence] == pytest.approx(logprobs, abs=1e-4)
    assert leader.scored[2] == pytest.approx(expected.scored[2], abs=1e-4)


def led_ranks(folder: Path, captures: int = 100) -> list[LedSaid]:
    """What two say of the requests, asked twice."""
    ports = free_port(), free_port()
    first = [msgspec.structs.replace(each, prompt_logprobs=False) for each in requests()]
    again = [
        msgspec.structs.replace(each, sequence_ids=[10 + i for i in each.sequence_ids])
        for each in first
    ]
    jobs = [
        LedJob(rank, str(folder), MORE_ROWS, ports, [first, again], captures) for rank in range(2)
    ]
    return run_ranks(led, jobs)


@pytest.mark.slow
def test_ranks_capture_together_between_the_leaders_steps(folder):
    leader, follower = led_ranks(folder)
    expected = ranks.answer(folder, requests(), MORE_ROWS).tokens
    assert leader.tokens == {**expected, **{10 + i: said for i, said in expected.items()}}
    assert leader.captured == follower.captured == 4
    assert leader.lost == follower.lost == ""


@pytest.mark.slow
def test_a_rank_that_cannot_capture_ends_its_group(folder):
    leader, follower = led_ranks(folder, captures=1)
    assert follower.captured == 1
    assert "no memory for a graph" in follower.lost
    assert "rank 0 lost its group" in leader.lost
