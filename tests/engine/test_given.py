"""Prompts whose embeddings are given as vectors: an engine comes to the tokens of their ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.engines.engine_link import Client
from support.pods.harness import free_port
from support.steps import ranks, step_scenes
from support.steps.ranks import CPU, Job
from support.steps.stepping import SAMPLED, VOCABULARY
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import GivenVectors, Request, StoppingParams
from tokenpod.engine.loop import EngineLoop
from tokenpod.scheduler.scheduler import Limits, Scheduler

#: A prompt is computed in several steps.
PREFILL = 4
PROMPT = [(7 * i + i * i) % VOCABULARY for i in range(11)]
OPTIONS = EngineOptions(
    model_folder="",
    dtype=None,
    device="cpu",
    threads=1,
    max_batch_size=2,
    max_batch_prefill_tokens=PREFILL,
    max_total_tokens=step_scenes.ROOM,
    max_batch_total_tokens=64,
)


@pytest.fixture(scope="module")
def folder(shared) -> Path:
    return step_scenes.small_model(shared)


@pytest.fixture(scope="module")
def table(folder) -> torch.Tensor:
    return step_scenes.table_of(folder)


def vectors(table: torch.Tensor, start: int, end: int, change: float = 0.0) -> GivenVectors:
    rows = table[PROMPT[start:end]].numpy() + np.float32(change)
    return GivenVectors(start, rows)


def request(number: int, *given: GivenVectors) -> Request:
    """The prompt, as far as it is not given."""
    prompt = list(PROMPT)
    for part in given:
        prompt[part.start : part.start + part.count] = [0] * part.count
    stopping = StoppingParams(max_new_tokens=4)
    return Request([number], prompt, SAMPLED, stopping, given=list(given))


@pytest.fixture
def answer(folder):
    """(request) -> tokens, and how many tokens of the prompt were cached."""
    executor = step_scenes.make("cpu", folder, CPU)
    limits = Limits(slots=64, max_rows=3, max_positions=16, prefill_tokens=PREFILL)
    link = Client()
    loop = EngineLoop(link, Scheduler(limits), executor)

    def run(asked: Request) -> tuple[list[int], int]:
        link.inbox.append(asked)
        for _ in range(20):
            loop.turn()
        loop.scheduler.check()
        (number,) = asked.sequence_ids
        return link.tokens[number], link.cached[number]

    return run


def test_given_embeddings_say_what_their_tokens_say(table, answer):
    expected, _ = answer(request(1))
    first, last = vectors(table, 0, 3), vectors(table, 6, len(PROMPT))
    assert answer(request(2, vectors(table, 0, len(PROMPT)))) == (expected, 0)
    assert answer(request(3, first, last)) == (expected, 3)


def test_equal_vectors_share_a_cached_prefix_and_no_others_do(table, answer):
    expected, _ = answer(request(1, vectors(table, 2, 9)))
    assert answer(request(2, vectors(table, 2, 9))) == (expected, len(PROMPT) - 1)
    # A shorter stretch of the same; then a vector that is another's.
    assert answer(request(3, vectors(table, 2, 6))) == (expected, 6)
    tokens, cached = answer(request(4, vectors(table, 2, 5), vectors(table, 5, 9, change=0.3)))
    assert cached == 5
    assert tokens != expected
    # The same tokens without vectors: what stands in their place is not what was computed.
    placeholders = request(5, vectors(table, 2, 9)).prompt
    plain = Request([5], placeholders, SAMPLED, StoppingParams(max_new_tokens=4))
    tokens, cached = answer(plain)
    assert cached == 2
    assert tokens != expected


@pytest.mark.pod
def test_two_ranks_take_given_embeddings(folder, table):
    port = free_port()
    asked = [request(1), request(2, vectors(table, 1, 4), vectors(table, 8, 11))]
    jobs = [Job(rank, [(2, port, [str(folder)])], asked, OPTIONS) for rank in range(2)]
    for ((said,),) in ranks.run(jobs):
        assert len(said.tokens[1]) == 4
        assert said.tokens[1] == said.tokens[2]
