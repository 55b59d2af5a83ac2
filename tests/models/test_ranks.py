"""A model divided among ranks says what it says whole: every family, over sockets, in processes."""

from __future__ import annotations

import msgspec
import pytest
import ranks
from harness import free_port
from ranks import Job, Said

from tokenpod.engine.types import EngineOptions, Request, SamplingParams, StoppingParams

WORLDS = (2, 4)
TOLERANCE = 1e-4

#: Rows and chunks are few, so that sequences wait, prompts are cut up and steps are mixed.
OPTIONS = EngineOptions(
    model_folder="",
    dtype=None,
    device="cpu",
    threads=1,
    max_batch_size=4,
    max_batch_prefill_tokens=24,
    max_total_tokens=80,
)

SAMPLED = SamplingParams(do_sample=True, temperature=1.2, top_k=30, seed=11)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4)


def requests() -> list[Request]:
    """Greedy, scored, with top tokens, sampled twice from a shared prefix, and penalised."""
    prompts = [[(11 * i + j * j) % 96 for j in range(length)] for i, length in enumerate((37, 9))]
    ends = StoppingParams(max_new_tokens=9)
    return [
        Request([1], prompts[0], SamplingParams(), ends, logprobs=True, prompt_logprobs=True),
        Request([2], prompts[1], SamplingParams(), ends, logprobs=True, top_n_tokens=3),
        Request([3, 4], prompts[1] + [5, 6], SAMPLED, ends, logprobs=True),
        Request([5], prompts[1][:4], PENALISED, ends, logprobs=True),
    ]


@pytest.fixture(scope="session")
def said(golden, kinds) -> dict[tuple[int, str], list[Said]]:
    """What each rank said, by world and kind; the processes are shared by all kinds."""
    folders = [str(golden(kind).folder) for kind in kinds]
    ports = {world: free_port() for world in WORLDS}
    processes = []
    for rank in range(max(WORLDS)):
        groups = [(world, port) for world, port in ports.items() if rank < world]
        processes.append(ranks.start(Job(rank, groups, folders, requests(), OPTIONS)))
    outputs = [process.communicate(timeout=240) for process in processes]
    for _, errors in outputs:
        assert not errors, errors.decode()
    answers: dict[tuple[int, str], list[Said]] = {}
    for out, _ in outputs:
        by_world = msgspec.msgpack.decode(out, type=list[list[Said]])
        # Ranks beyond the smaller group are in the larger one only.
        for world, by_kind in zip(WORLDS[-len(by_world) :], by_world, strict=True):
            for kind, answer in zip(kinds, by_kind, strict=True):
                answers.setdefault((world, kind), []).append(answer)
    return answers


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_together_say_what_one_says(world, kind, golden, said):
    expected = ranks.answer(golden(kind).folder, requests(), OPTIONS)
    leader, *followers = said[world, kind]
    assert len(followers) == world - 1
    assert leader.tokens == dict(expected.tokens)
    assert leader.tops == dict(expected.tops)
    assert leader.failures == expected.failures == []
    for sequence, logprobs in expected.logprobs.items():
        assert leader.logprobs[sequence] == pytest.approx(logprobs, abs=TOLERANCE)
    assert leader.scored.keys() == expected.scored.keys() == {1}
    assert leader.scored[1] == pytest.approx(expected.scored[1], abs=TOLERANCE)
    for follower in followers:
        assert follower.tokens == leader.tokens


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_holds_its_share(world, kind, load_folder, golden, said):
    """All but the norms, routers, biases of sums, and replicated key/value heads is divided."""
    whole = load_folder(golden(kind).folder).weight_bytes
    for answer in said[world, kind]:
        assert whole / world <= answer.weight_bytes < 1.25 * whole / world
