"""The native decoder computes what transformers computes, however the work is cut and placed."""

from __future__ import annotations

import pytest
import torch

TOLERANCE = 1e-4


@pytest.fixture
def pod(golden, kind, load_folder, schedule):
    """A kind's reference, and a scheduler over our model of the same checkpoint."""
    reference = golden(kind)
    return reference, schedule(load_folder(reference.folder))


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


def test_a_whole_prompt_at_once(pod, text):
    reference, scheduler = pod
    tokens = text(37)
    (ours,) = scheduler.step([(scheduler.sequence(tokens), 37)])
    assert_close(ours, reference.logprobs(tokens))


def test_greedy_tokens_are_the_same(pod, text):
    reference, scheduler = pod
    prompt = text(11)
    assert scheduler.greedy(scheduler.sequence(prompt), 24) == reference.greedy(prompt, 24)


def test_a_prompt_in_chunks(pod, text):
    reference, scheduler = pod
    tokens = text(41)
    sequence = scheduler.sequence(tokens)
    ours = []
    for count in (5, 1, 13, 2, 20):
        scheduler.skip_slots(3)
        ours += scheduler.step([(sequence, count)])
    assert_close(torch.cat(ours), reference.logprobs(tokens))


def test_a_cached_prefix_in_slots_of_another_sequence(pod, text):
    reference, scheduler = pod
    first = text(30)
    second = first[:19] + text(14, seed=1)
    owner = scheduler.sequence(first)
    scheduler.step([(owner, 30)])
    sharer = scheduler.sequence(second, prefix_of=owner, shared=19)
    (ours,) = scheduler.step([(sharer, 14)])
    assert_close(ours, reference.logprobs(second)[19:])


def test_slots_that_all_lie_apart(pod, text):
    reference, scheduler = pod
    tokens = text(33)
    scheduler.skip_slots(0, every=2)
    sequence = scheduler.sequence(tokens)
    ours = [scheduler.step([(sequence, count)])[0] for count in (17, 1, 8, 1, 6)]
    assert_close(torch.cat(ours), reference.logprobs(tokens))


def test_decoding_rows_and_chunks_in_one_step(pod, text):
    reference, scheduler = pod
    texts = [text(25, seed=seed) for seed in range(5)]
    a, b, c, d, e = (scheduler.sequence(tokens) for tokens in texts)
    scheduler.step([(a, 9), (b, 21)])
    scheduler.step([(c, 12), (a, 1)])
    results = scheduler.step([(e, 3), (a, 1), (c, 13), (b, 1), (d, 25)])
    spans = [(4, 0, 3), (0, 10, 11), (2, 12, 25), (1, 21, 22), (3, 0, 25)]
    for ours, (which, start, end) in zip(results, spans, strict=True):
        assert_close(ours, reference.logprobs(texts[which])[start:end])


def test_two_samples_continue_one_prompt(pod, text):
    reference, scheduler = pod
    prompt = text(16)
    first = scheduler.sequence(prompt + text(10, seed=1))
    scheduler.step([(first, 16)])
    second = scheduler.sequence(prompt + text(10, seed=2), prefix_of=first, shared=16)
    ours = [scheduler.step([(first, 1), (second, 1)]) for _ in range(10)]
    for which, sequence in enumerate((first, second)):
        got = torch.cat([step[which] for step in ours])
        assert_close(got, reference.logprobs(sequence.tokens)[16:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2-window",
        "qwen3",
        "mixtral",
        "qwen3-moe",
        "gemma2",
        "opt",
        "gpt-neox",
        "bloom",
    ],
)
def test_half_precision_errs_no_more_than_transformers(
    name, dtype, golden, load_folder, schedule, text
):
    tokens = text(48)
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
