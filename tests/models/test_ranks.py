"""A model divided among ranks says what it says whole: over sockets, in processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.examples import ALL
from support.pods.harness import free_port
from support.steps import ranks
from support.steps.ranks import Job, Said
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams

pytestmark = pytest.mark.pod

TOLERANCE = 1e-4

#: Latent rows, a shared expert with a gate, and sinks with biased experts.
EXPERTS = ("deepseek-v2-lite", "qwen2-moe", "gpt-oss")
#: Which kinds so many ranks share: whatever is divided in a way of its own. The arithmetic of all
#: others is that of test_decoder.py; each collective of four processes waits for a core.
SHARED = {
    2: ["llama-odd-vocabulary", "gemma2", "falcon-7b", "opt-8-bits", *EXPERTS],
    4: ["llama-grouped-tied", "mixtral", "bloom", *(("qwen2-8-bits", "opt-350m") if ALL else ())],
}

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

#: Where numbers are rounded to 8 bits, sums of parts that differ in their last place may round
#: otherwise.
TOLERANCE_8_BITS = 5e-3

#: Kinds of which there is a second checkpoint, whose weights, keys and values become 8 bits.
EIGHT_BITS = {"opt-8-bits": "opt-350m", **({"qwen2-8-bits": "qwen2"} if ALL else {})}

SAMPLED = SamplingParams(do_sample=True, temperature=1.2, top_k=30, seed=11)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4)


def requests() -> list[Request]:
    """Greedy, scored, with top tokens, sampled twice from a shared prefix, and penalised."""
    prompts = [[(11 * i + j * j) % 96 for j in range(length)] for i, length in enumerate((29, 9))]
    ends = StoppingParams(max_new_tokens=4)
    return [
        Request([1], prompts[0], SamplingParams(), ends, logprobs=True, prompt_logprobs=True),
        Request([2], prompts[1], SamplingParams(), ends, logprobs=True, top_n_tokens=3),
        Request([3, 4], prompts[1] + [5, 6], SAMPLED, ends, logprobs=True),
        Request([5], prompts[1][:4], PENALISED, ends, logprobs=True),
    ]


@pytest.fixture(scope="session")
def folder_of(golden):
    """Of a kind's checkpoint; a kind of 8 bits has one of its own, by which it is known."""

    def find(kind: str) -> Path:
        if kind in EIGHT_BITS:
            return golden(EIGHT_BITS[kind], eos_token_id=5).folder
        return golden(kind).folder

    return find


def options_of(kind: str) -> EngineOptions:
    return ranks.eight_bits(OPTIONS) if kind in EIGHT_BITS else OPTIONS


@pytest.fixture(scope="session")
def said(folder_of) -> dict[tuple[int, str], list[Said]]:
    """What each rank said, by world and kind; the processes are shared by all kinds."""
    groups = [
        (world, free_port(), [str(folder_of(kind)) for kind in kinds])
        for world, kinds in SHARED.items()
    ]
    quantised = [str(folder_of(kind)) for kind in EIGHT_BITS]
    jobs = [
        Job(
            rank,
            [group for group in groups if rank < group[0]],
            requests(),
            OPTIONS,
            quantised=quantised,
        )
        for rank in range(max(SHARED))
    ]
    answers: dict[tuple[int, str], list[Said]] = {}
    for job, by_world in zip(jobs, ranks.run(jobs), strict=True):
        for (world, _, _), by_kind in zip(job.groups, by_world, strict=True):
            for kind, answer in zip(SHARED[world], by_kind, strict=True):
                answers.setdefault((world, kind), []).append(answer)
    return answers


@pytest.mark.parametrize(
    ("world", "name"), [(world, kind) for world, kinds in SHARED.items() for kind in kinds]
)
def test_ranks_together_say_what_one_says(world, name, folder_of, said):
    expected = ranks.answer(folder_of(name), requests(), options_of(name))
    tolerance = TOLERANCE_8_BITS if name in EIGHT_BITS else TOLERANCE
    leader, *followers = said[world, name]
    assert len(followers) == world - 1
    assert leader.tokens == dict(expected.tokens)
    assert leader.tops == dict(expected.tops)
    assert leader.failures == expected.failures == []
    for sequence, logprobs in expected.logprobs.items():
        assert leader.logprobs[sequence] == pytest.approx(logprobs, abs=tolerance)
    assert leader.scored.keys() == expected.scored.keys() == {1}
    assert leader.scored[1] == pytest.approx(expected.scored[1], abs=tolerance)
    for follower in followers:
        assert follower.tokens == leader.tokens


def test_each_rank_holds_its_share_of_the_weights(said, load_folder, folder_of):
    """All is divided but norms, positions, routers, and keys of fewer heads than ranks."""
    for (world, kind), answers in said.items():
        if kind in EIGHT_BITS:  # each rank has the scales of all that it adds to
            continue
        model = load_folder(folder_of(kind))
        positions = model.config.embedding.positions
        whole = 0 if positions is None else 4 * positions.rows * model.config.hidden_size
        part = (model.weight_bytes - whole) / world
        for answer in answers:
            assert part <= answer.weight_bytes - whole < 1.3 * part
            assert answer.parameters == model.parameters_count


def test_ranks_have_as_many_slots_as_the_leader(said):
    for answers in said.values():
        assert len({answer.slots for answer in answers}) == 1
