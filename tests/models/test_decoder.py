"""The native decoder computes what transformers computes, however the work is cut and placed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.steps.hand_scheduler import HandScheduler
from support.steps.lockstep import LockstepGroup, in_lockstep
from support.steps.walks import walk
from tokenpod.kernels.backends import reference
from tokenpod.models import load as loading
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_config
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import Shard

pytestmark = pytest.mark.compute


def load(folder: Path, **more):
    return load_model(
        folder,
        dtype=None,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=256,
        **more,
    )


def test_a_step_may_run_the_first_layers_alone_and_the_next_one_runs_all(golden):
    """Where numbers are of no interest, since all layers are alike."""
    model = load(golden("llama", num_hidden_layers=3).folder)
    scheduler = HandScheduler(model)
    assert model.config.layers_of_all_kinds + 1 < len(model.config.layers)

    def scores() -> torch.Tensor:
        return scheduler.step([(scheduler.sequence([3, 5, 7]), 3)])[0]

    whole = scores()
    with model.first_layers():
        assert not torch.equal(scores(), whole)
    assert torch.equal(scores(), whole)


def walk_of_ranks(folder: Path, world: int, tokens: list[int], other: list[int]) -> torch.Tensor:
    """What ranks say to 30 tokens in three steps, two of them mixed: log probabilities."""

    def rank(group) -> torch.Tensor:
        with torch.inference_mode():
            torch.set_num_threads(1)
            model = load(folder, shard=Shard(group.rank, world), group=group)
            scheduler = HandScheduler(model)
            long, short = scheduler.sequence(tokens), scheduler.sequence(other)
            results = scheduler.step([(long, 17)])
            results += scheduler.step([(short, 8), (long, 1)])
            results += scheduler.step([(long, 12), (short, 1)])
            return torch.cat([results[i] for i in (0, 2, 3, 1, 4)])

    leader, *followers = in_lockstep(world, rank)
    assert all(torch.equal(leader, follower) for follower in followers)
    return leader


def fits(folder: Path, world: int) -> bool:
    try:
        read_config(folder).check(world)
    except ModelError:
        return False
    return True


def test_the_model_says_what_transformers_says(kind, golden, text):
    checkpoint = golden(kind)
    walk(HandScheduler(load(checkpoint.folder), slots=1024), text).check(checkpoint)


@pytest.mark.sampled(7, "slow")
@pytest.mark.parametrize("world", [2, 4])
def test_its_ranks_say_what_transformers_says(kind, world, golden, text, monkeypatch):
    """Ranks are threads of this process."""
    checkpoint = golden(kind)
    if world == 4 and not fits(checkpoint.folder, world):
        pytest.skip("its heads can't be divided by 4")
    # Plain operations are the second path that each family takes.
    monkeypatch.setattr(loading, "operations_for", lambda device: reference.OPERATIONS)
    tokens, other = text(30, seed=5), text(9, seed=6)
    expected = torch.cat(checkpoint.logprobs_of([tokens, other]))
    ours = walk_of_ranks(checkpoint.folder, world, tokens, other)
    torch.testing.assert_close(ours, expected, rtol=0, atol=checkpoint.tolerance)


def test_a_shared_expert_costs_ranks_no_sum_of_its_own(golden, text, monkeypatch):
    """Of each layer and step there are two: of attention, and of all experts."""
    folder, adds = golden("qwen2-moe").folder, []
    add = LockstepGroup.add

    def counted(group, partial, residual):
        if group.rank == 0:
            adds.append(len(partial))
        add(group, partial, residual)

    monkeypatch.setattr(LockstepGroup, "add", counted)
    walk_of_ranks(folder, 2, text(30, seed=5), text(9, seed=6))
    steps, layers = 3, load(folder).config.layers
    assert len(adds) == 2 * steps * len(layers)


@pytest.mark.sampled(11, "slow")
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],  # loops each
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2-window",
        "gemma2",
        "mixtral",
        "qwen3-moe",
        "qwen3",
        "opt",
        "gpt-neox",
        "bloom",
        "gemma3",
        "olmo2",
        "cohere-varied",
        "granite-varied",
        "nemotron",
        "stablelm-varied",
        "ministral3",
    ],
)
def test_half_precision_errs_no_more_than_transformers(
    name, dtype, golden, load_folder, schedule, text
):
    # A text for which rounding chooses no other expert: that is an error of another size.
    tokens = text(48, seed=1)
    half = golden(name, dtype=dtype)
    ours = schedule(load_folder(half.folder))
    assert ours.model.dtype == dtype
    exact = schedule(load_folder(half.folder, dtype=torch.float32))
    (expected,) = exact.step([(exact.sequence(tokens), 48)])
    sequence = ours.sequence(tokens)
    got = torch.cat([ours.step([(sequence, count)])[0] for count in (30, 1, 1, 16)])
    error = (got - expected).square().mean().sqrt()
    peer_error = (half.logprobs(tokens) - expected).square().mean().sqrt()
    assert 0 < error <= 1.15 * peer_error
