"""Steps that are noted once and then played compute what the model computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.engines.demo_engine import POSITIONS, SLOTS, VOCABULARY, demo_model, pool
from support.engines.engine_link import Client
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.cpu import noted_steps
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.cpu.noted_steps import MOST_ROWS, NotedSteps
from tokenpod.engine.loop import EngineLoop
from tokenpod.kernels.compiled.tape import Tape
from tokenpod.kernels.pointwise.compiled_pointwise import rms_norm
from tokenpod.scheduler.scheduler import Limits, Scheduler


def answers(*, noted: bool, rows: int = 3, fewest: int = 5):
    """What requests that come and go get, and the executor."""
    executor = CpuExecutor(demo_model(), pool(SLOTS), rows=rows + 1, vocab_size=VOCABULARY)
    executor._noted = executor._noted if noted else None
    scheduler = Scheduler(Limits(SLOTS - 16, rows, POSITIONS, 64))
    requests = [
        Request(
            [i],
            [7 + i + k for k in range(3 + 11 * (i % 3))],
            SamplingParams(do_sample=i % 3 == 2, seed=i),
            StoppingParams(max_new_tokens=fewest + 4 * (i % 3), eos_token_ids=frozenset()),
            logprobs=True,
        )
        for i in range(rows)
    ]
    link = Client(requests)
    loop = EngineLoop(link, scheduler, executor)
    while link.left:
        loop.turn()
    return (link.tokens, link.logprobs), executor


def test_played_steps_bring_the_same_tokens_to_the_last_bit(monkeypatch):
    monkeypatch.setattr(noted_steps, "_BEFORE", 1)
    played, executor = answers(noted=True)
    computed, _ = answers(noted=False)
    assert played == computed
    proved = [rows for rows, noted in executor._noted._noted.items() if noted and noted.proved]
    assert proved
    assert max(proved) <= MOST_ROWS


def test_steps_of_many_rows_are_filled_up_with_rows_that_nobody_reads(monkeypatch):
    monkeypatch.setattr(noted_steps, "_BEFORE", 0)
    (tokens, logprobs), executor = answers(noted=True, rows=18, fewest=6)
    (expected, expected_logprobs), _ = answers(noted=False, rows=18, fewest=6)
    assert tokens == expected
    for sequence, numbers in logprobs.items():
        assert numbers == pytest.approx(expected_logprobs[sequence], abs=1e-4)
    proved = {rows for rows, noted in executor._noted._noted.items() if noted and noted.proved}
    assert 20 in proved
    assert all(rows % 4 == 0 for rows in proved if rows > 16)


def test_a_tape_computes_the_same_of_what_lies_there_then():
    weight, x = torch.rand(32), torch.rand(3, 32)
    with torch.inference_mode(), Tape() as tape:
        y = rms_norm(x.sin() * 2, weight, 1e-6)
        first, second = y.chunk(2, dim=1)
        z = torch.add(first, second).neg_()
    assert tape.whole
    x.copy_(torch.rand(3, 32))
    with torch.inference_mode():
        tape.play()
    expected = rms_norm(x.sin() * 2, weight, 1e-6)
    assert torch.equal(z, -(expected[:, :16] + expected[:, 16:]))


def test_what_reads_a_number_is_not_noted():
    with torch.inference_mode(), Tape() as tape:
        _ = torch.rand(3).sum().item()
    assert not tape.whole


@pytest.mark.parametrize("numpy", [False, True])
def test_a_step_that_finds_other_numbers_than_the_model_is_not_played(numpy):
    """What numpy computes is not noted; the second step shows it."""
    steps, calls, x = NotedSteps(), [], torch.zeros(1, 8)

    def compute():
        calls.append(1)
        if numpy:
            return torch.from_numpy(np.exp(x.numpy())) + 1
        return x.exp() + 1

    for number in range(4):
        with torch.inference_mode():
            x.fill_(number)
            found = steps.logits(compute, [[(0, 1)]], [1])
        assert torch.allclose(found, torch.full((1, 8), number).exp() + 1)
    assert len(calls) == (4 if numpy else 2)


def test_a_wrong_tape_leaves_nothing_behind():
    """What it has written, into keys and values say, the model writes over."""
    steps, kept = NotedSteps(), torch.zeros(1, 8)
    for number in range(3):

        def compute(number=number):
            kept.fill_(number)
            return kept + 1

        with torch.inference_mode():
            found = steps.logits(compute, [[(0, 1)]], [1])
        assert float(kept[0, 0]) == number
        assert float(found[0, 0]) == number + 1
    assert steps._noted[1] is None


def test_more_runs_than_there_is_room_for_are_computed():
    class Full:
        def refresh(self, b_runs, b_context):
            return False

    steps, x = NotedSteps(), torch.zeros(1, 8)

    def compute():
        return x + 1

    steps.logits(compute, [[(0, 1)]], [1])
    steps._noted[1].tape.plans.append(Full())
    x.fill_(5)
    assert float(steps.logits(compute, [[(0, 1)]], [1])[0, 0]) == 6
