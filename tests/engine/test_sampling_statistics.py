"""Many draws follow the distribution that the reference gives: chi-square over seeds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from support.sampling.samplers import set_row
from support.sampling.sampling_reference import choose, green, softmax
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.cpu.cpu_sampler import CpuSampler
from tokenpod.engine.sampling.rng import vocabulary_noise

DRAWS = 2048
VOCAB = 12
LOGITS = torch.linspace(1.5, -1.5, VOCAB)
PROMPT, OUTPUTS = [0, 3], [1, 1, 2]


def counts(params: dict) -> np.ndarray:
    """How often each token was drawn: positions of one sequence's seed, 64 rows at a time."""
    sampler = CpuSampler(rows=64, vocab_size=VOCAB)
    total = np.zeros(VOCAB, dtype=int)
    for start in range(0, DRAWS, 64):
        for row in range(64):
            set_row(
                sampler,
                row,
                SamplingParams(do_sample=True, seed=start + row, **params),
                prompt=PROMPT,
                outputs=OUTPUTS,
            )
        tokens = sampler.sample(LOGITS.expand(64, -1), list(range(64)), [len(OUTPUTS)] * 64).tokens
        total += np.bincount(tokens.numpy(), minlength=VOCAB)
    return total


def excess(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations by which chi-square is above its mean; inf for an impossible token."""
    possible = probabilities > 0
    if observed[~possible].any():
        return float("inf")
    expected = observed.sum() * probabilities[possible]
    freedom = max(int(possible.sum()) - 1, 1)
    chi_square = ((observed[possible] - expected) ** 2 / expected).sum()
    return float((chi_square - freedom) / np.sqrt(2 * freedom))


@pytest.mark.compute
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"typical_p": 0.6},
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.8},
        {"relative_frequency_penalty": 2.0},
        {"logit_bias": {0: -2.0, 11: 3.0}},
        {"watermark": True},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
    ],
    ids=lambda params: "+".join(params),
)
def test_draws_follow_the_processed_distribution_and_no_other(params):
    expected = choose(
        LOGITS.numpy(),
        SamplingParams(do_sample=True, **params),
        prompt=PROMPT,
        outputs=OUTPUTS,
    )
    observed = counts(params)
    assert excess(observed, np.exp(expected.logprobs)) < 6
    # The test can tell: without the processor the same counts are impossible.
    assert excess(observed, softmax(LOGITS.double().numpy())) > 20


def noise(seeds: list[int], streams: list[int], positions: list[int], vocab: int) -> np.ndarray:
    return vocabulary_noise(*map(torch.tensor, (seeds, streams, positions)), vocab).double().numpy()


def test_noise_is_exponential():
    values = np.sort(noise([9], [0], [0], 100_000)[0])
    steps = np.arange(1, len(values) + 1) / len(values)
    # Kolmogorov-Smirnov: 2.5 / sqrt(n) is passed by chance once in 100,000 times.
    limit = 2.5 / np.sqrt(len(values))
    assert np.abs(steps - (1 - np.exp(-values))).max() < limit
    assert np.abs(steps - (1 - np.exp(-1.02 * values))).max() > limit / 2


def test_seeds_streams_and_positions_are_independent():
    # The highest bit of a seed (-2^63 as int64) counts, and so does each other input.
    rows = noise(
        [1, 2, 1, 1, 2, -(2**63) + 1, 1 + 2**32],
        [0, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        20_000,
    )
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 6 / np.sqrt(rows.shape[1])


def test_the_largest_seed_draws_like_the_reference():
    params = SamplingParams(do_sample=True, seed=2**64 - 1)
    sampler = CpuSampler(rows=1, vocab_size=VOCAB)
    set_row(
        sampler,
        0,
        params,
        stream=5,
        prompt=PROMPT,
    )
    tokens, expected = [], []
    for position in range(20):
        expected.append(
            choose(LOGITS.numpy(), params, prompt=PROMPT, outputs=[0] * position, stream=5).token
        )
        tokens.append(int(sampler.sample(LOGITS[None], [0], [position]).tokens[0]))
    assert tokens == expected
    assert len(set(tokens)) > 3


def green_score(*, watermark: bool) -> float:
    """The detector's z-score of 200 tokens sampled over a flat distribution of 100."""
    sampler = CpuSampler(rows=1, vocab_size=100)
    set_row(
        sampler,
        0,
        SamplingParams(do_sample=True, watermark=watermark, seed=11),
        prompt=[4],
    )
    flat = torch.zeros(1, 100)
    tokens = [4] + [int(sampler.sample(flat, [0], [t]).tokens[0]) for t in range(200)]
    hits = sum(green(before, 100)[after] for before, after in pairwise(tokens))
    return (hits - 0.5 * 200) / np.sqrt(200 * 0.25)


def test_a_detector_finds_the_watermark_and_only_there():
    assert green_score(watermark=True) > 6
    assert abs(green_score(watermark=False)) < 4
