"""A mask of allowed tokens for each row: host and device draw the same under it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.sampling.samplers import (
    ALONE,
    INF,
    TOLERANCE,
    halves,
    near_a_border,
    on_cpu,
    on_device,
    random_logits,
    sampled,
    step,
)
from tokenpod.core.sampling import SamplingParams

VOCAB = 97
ROWS = [ALONE[i] for i in (0, 1, 7, 8, 10, 12, 17, 22, 28, 35)]


def bits_of(allowed: np.ndarray) -> torch.Tensor:
    """[n, vocab] bool -> [n, ceil(vocab / 32)] int32."""
    n, vocab = allowed.shape
    padded = np.zeros((n, -(-vocab // 32) * 32), np.uint8)
    padded[:, :vocab] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def some_allowed(n: int, vocab: int, seed: int = 0) -> np.ndarray:
    allowed = np.random.default_rng(seed).random((n, vocab)) < 0.3
    allowed[:, 31] = True  # the sign bit of a word
    return allowed


def cpu_sampled(rows, logits, masks=None):
    return on_cpu(rows, logits.shape[1]).sample(
        logits, list(range(len(rows))), [0] * len(rows), masks
    )


def test_under_a_mask_host_and_device_draw_the_same_allowed_token():
    logits, allowed = halves(len(ROWS), VOCAB, seed=1), some_allowed(len(ROWS), VOCAB)
    masks = bits_of(allowed)
    want, got = (
        cpu_sampled(ROWS, logits, masks),
        step(on_device(ROWS, VOCAB), logits, masks=masks),
    )
    forbidden = logits.masked_fill(~torch.from_numpy(allowed), -INF)
    for at, row in enumerate(ROWS):
        token = int(want.tokens[at])
        assert allowed[at, token]
        exact = token == int(got.tokens[at]) and float(got.logprobs[at]) == pytest.approx(
            float(want.logprobs[at]), rel=TOLERANCE, abs=TOLERANCE
        )
        assert exact or near_a_border(row, forbidden[at], row[1].get("outputs", [])), row


def test_a_mask_is_as_if_the_other_logits_were_minus_infinity():
    logits, allowed = random_logits(len(ROWS), VOCAB), some_allowed(len(ROWS), VOCAB)
    masked = cpu_sampled(ROWS, logits, bits_of(allowed))
    infinite = cpu_sampled(ROWS, logits.masked_fill(~torch.from_numpy(allowed), -INF))
    assert torch.equal(masked.tokens, infinite.tokens)
    assert torch.equal(masked.logprobs, infinite.logprobs)


@pytest.mark.parametrize("only", [0, 31, 32, 96])
def test_a_mask_that_allows_one_token_forces_it_on_its_row_alone(only):
    rows = [(SamplingParams(), {}), (sampled(top_k=3), {}), (sampled(), {})]
    logits = random_logits(3, VOCAB)
    allowed = np.ones((3, VOCAB), bool)
    allowed[1] = np.arange(VOCAB) == only
    free = cpu_sampled(rows, logits)
    for got in (
        cpu_sampled(rows, logits, bits_of(allowed)),
        step(on_device(rows, VOCAB), logits, masks=bits_of(allowed)),
    ):
        assert got.tokens[[0, 2]].tolist() == free.tokens[[0, 2]].tolist()
        assert (int(got.tokens[1]), float(got.logprobs[1])) == (only, 0.0)


def test_a_mask_that_allows_nothing_and_a_bad_logit_under_one_mark_their_rows():
    rows = [(SamplingParams(), {}), (sampled(), {}), (SamplingParams(), {}), (sampled(), {})]
    logits = random_logits(4, VOCAB)
    logits[2, 5], logits[3, 5] = float("nan"), INF
    allowed = np.ones((4, VOCAB), bool)
    allowed[:2], allowed[2:, 5] = False, False
    masks = bits_of(allowed)
    for got in (
        cpu_sampled(rows, logits, masks),
        step(on_device(rows, VOCAB), logits, masks=masks),
    ):
        assert got.tokens.tolist() == [-1] * 4


def test_top_tokens_are_of_the_raw_logits_or_of_what_the_mask_allows():
    processed = SamplingParams(top_of_processed=True)
    rows = [(SamplingParams(), {"top_n": 2}), (processed, {"top_n": 2})]
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(2, -1).contiguous()
    masks = bits_of(np.array([[False, True, False, True]] * 2))
    for got in (cpu_sampled(rows, logits, masks), step(on_device(rows, 4), logits, masks=masks)):
        assert [ids for _, ids, _ in got.tops] == [[0, 1], [1, 3]]
        assert got.tokens.tolist() == [1, 1]
