"""The device's sampler draws what the specification, the CPU's, draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from support.kernels.interpreted import DEVICE, INTERPRETED
from support.sampling.samplers import (
    ALONE,
    INF,
    SMALL,
    TOLERANCE,
    Row,
    halves,
    mixtures,
    near_a_border,
    on_cpu,
    on_device,
    random_logits,
    sampled,
    seat,
    step,
    wide,
    with_holes,
)
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.gpu.device_sampler import Launches, SamplerTiles

pytestmark = pytest.mark.compute


def same_tokens(
    rows: list[Row], steps: list[torch.Tensor], tiles: SamplerTiles = SMALL, first: int = 0
) -> None:
    """Every step's tokens equal the specification's, unless rounding explains that they don't."""
    vocab = steps[0].shape[1]
    cpu, device = on_cpu(rows, vocab), on_device(rows, vocab, tiles)
    live, outputs = list(range(len(rows))), [list(row.get("outputs", [])) for _, row in rows]
    for position, logits in enumerate(steps, first):
        want = cpu.sample(logits[live], live, [position] * len(live))
        got = step(device, logits[live], position, live)
        for at, row in enumerate(list(live)):
            tokens = int(want.tokens[at]), int(got.tokens[at])
            exact = tokens[0] == tokens[1] and float(got.logprobs[at]) == pytest.approx(
                float(want.logprobs[at]), rel=TOLERANCE, abs=TOLERANCE
            )
            if not exact:
                said = f"row {row}, {rows[row][0]}, step {position}: {tokens}"
                assert near_a_border(rows[row], logits[row], outputs[row]), said
                live.remove(row)  # its history is another one now
            outputs[row].append(tokens[0])


# -- tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [halves, with_holes, wide])
def test_every_processor_alone_and_all_together_draw_the_same_tokens(make: Callable):
    rows = ALONE[:: 3 if INTERPRETED and make is not halves else 1]
    same_tokens(rows, [make(len(rows), 97, seed=0)])


def test_histories_grow_by_what_was_drawn():
    rows = ALONE[:: 3 if INTERPRETED else 1]
    same_tokens(
        rows, [random_logits(len(rows), 97, seed=t) for t in range(3)], SamplerTiles(split=128)
    )


@pytest.mark.parametrize("first", [5, 4000])
def test_ends_are_boosted_alike_wherever_a_text_is(first: int):
    rows = [row for row in ALONE if row[0].eos_boost_factor > 1]
    rows = [(params, {**row, "outputs": [5] * first}) for params, row in rows]
    same_tokens(rows, [random_logits(len(rows), 97, seed=t) for t in range(2)], first=first)


@pytest.mark.parametrize("vocab", [2, 300])
def test_mixtures_of_parameters_draw_the_same_tokens(vocab):
    n = 6 if INTERPRETED else 60
    rows = mixtures(n, vocab, seed=vocab)
    same_tokens(rows, [halves(n, vocab, seed=t) for t in range(2)])


def test_typical_tokens_may_all_be_less_likely_than_the_mass_that_may_be_lost():
    # Two thirds of the mass lie far below the best token, and closer to the mean.
    logits = torch.full((6, 97), -3.87).index_fill(1, torch.tensor([50]), 0.0)
    same_tokens([(sampled(typical_p=0.3, seed=seed), {}) for seed in range(6)], [logits])


def test_tiles_do_not_change_tokens():
    rows = mixtures(6, 200, seed=1)
    logits = random_logits(6, 200)
    usual = step(on_device(rows, 200), logits)
    for tiles in (
        SamplerTiles(split=256, groups=8),
        SamplerTiles(split=64, groups=1, block=256, pivots=1),
    ):
        assert torch.equal(step(on_device(rows, 200, tiles), logits).tokens, usual.tokens)


# -- rows are alone ----------------------------------------------------------------------------

FEW = [ALONE[i] for i in (0, 1, 8, 10, 16, 22, 28, 35)]


def test_bits_do_not_depend_on_the_batch():
    logits = random_logits(len(FEW), 97)
    together = step(on_device(FEW, 97), logits)
    order = np.random.default_rng(0).permutation(len(FEW)).tolist()
    turned = step(on_device(FEW, 97), logits[order], rows=order)
    for at, row in enumerate(order):
        assert turned.tokens[at] == together.tokens[row]
        assert turned.logprobs[at] == together.logprobs[row]
    alone = step(on_device(FEW, 97), logits[5:6], rows=[5])
    assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[5], together.logprobs[5])


@pytest.mark.parametrize("poison", [float("nan"), INF, None])
def test_a_row_that_holds_nan_or_inf_is_marked_and_no_other_changes(poison):
    logits = random_logits(len(FEW), 97)
    clean = step(on_device(FEW, 97), logits)
    for parity in (0, 1):
        dirty = logits.clone()
        dirty[parity::2, 80] = 0.0 if poison is None else poison
        if poison is None:
            dirty[parity::2] = -INF
        samples = step(on_device(FEW, 97), dirty)
        assert samples.tokens[parity::2].tolist() == [-1] * 4
        assert samples.logprobs[parity::2].tolist() == [0.0] * 4
        assert torch.equal(samples.tokens[1 - parity :: 2], clean.tokens[1 - parity :: 2])
        assert torch.equal(samples.logprobs[1 - parity :: 2], clean.logprobs[1 - parity :: 2])


def test_nothing_left_to_draw_is_marked_like_a_bad_row():
    ends = {"eos_token_ids": frozenset({0, 1}), "min_new_tokens": 1}
    rows = [(SamplingParams(), ends), (sampled(), ends), (sampled(top_k=1), ends)]
    assert step(on_device(rows, 2), torch.ones(3, 2)).tokens.tolist() == [-1, -1, -1]


def test_logits_are_left_as_they_were():
    logits = random_logits(len(FEW), 97).to(DEVICE)
    before = logits.clone()
    step(on_device(FEW, 97), logits)
    assert torch.equal(logits, before)


def test_rows_of_wider_logits_are_read_by_their_stride():
    logits = random_logits(len(FEW), 120)
    whole = step(on_device(FEW, 97), logits[:, :97].contiguous())
    assert torch.equal(step(on_device(FEW, 97), logits[:, :97]).tokens, whole.tokens)


def test_the_padding_row_is_greedy_and_may_come_often():
    sampler = on_device(FEW, 97)
    pad = sampler.padding_row
    logits = random_logits(4, 97)
    samples = step(sampler, logits, rows=[3, pad, pad, pad])
    assert samples.tokens[1:].tolist() == logits[1:].argmax(1).tolist()
    assert samples.tokens[0] == step(on_device(FEW, 97), logits[:1], rows=[3]).tokens[0]


@pytest.mark.parametrize("row", [1, 5, 7, 33, 35])
def test_a_resumed_sequence_goes_on_as_if_never_interrupted(row):
    params, changes = ALONE[row]
    changes = {**changes, "outputs": [], "prompt": [7, 8]}
    logits = random_logits(4, 40, scale=1.0)
    whole = on_device([(params, changes)], 40)
    tokens = [int(step(whole, logits[t : t + 1], t).tokens[0]) for t in range(4)]
    resumed = on_device([(params, {**changes, "outputs": tokens[:2]})], 40)
    assert [int(step(resumed, logits[t : t + 1], t).tokens[0]) for t in (2, 3)] == tokens[2:]


def test_a_row_taken_again_knows_nothing_of_its_last_sequence():
    row = (SamplingParams(repetition_penalty=5.0, logit_bias={2: 0.5}), {"prompt": [0]})
    sampler = on_device([row], 3)
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert [int(step(sampler, logits, t).tokens[0]) for t in range(2)] == [1, 2]
    sampler.clear_row(0)
    seat(sampler, [row])
    assert int(step(sampler, logits).tokens[0]) == 1
    seat(sampler, [(SamplingParams(), {})])
    assert [int(step(sampler, logits, t).tokens[0]) for t in range(2)] == [1, 1]


# -- what is launched --------------------------------------------------------------------------


def test_launches_follow_the_live_rows():
    sampler = on_device([ALONE[0], (sampled(), {}), (SamplingParams(), {"top_n": 2})], 50)
    assert sampler.launches == Launches(draws=True, tops=True)
    sampler.clear_row(1)
    assert sampler.launches == Launches(draws=False, tops=True)
    sampler.clear_row(2)
    assert sampler.launches == Launches(draws=False, tops=False)


def test_more_launches_than_needed_change_nothing():
    logits = random_logits(1, 97)
    lean = step(on_device(ALONE[:1], 97), logits)
    full = step(on_device(ALONE[:1], 97), logits, launches=Launches(draws=True, tops=True))
    assert (lean.tokens, lean.logprobs) == (full.tokens, full.logprobs)
    assert full.top_ids.tolist() == [[-1] * 64]
    assert lean.top_ids.shape == (1, 0)


def test_a_row_with_too_many_edits_is_refused():
    sampler = on_device(ALONE[:1], 97)
    bias = dict.fromkeys(range(15), 1.0)
    ends = {"eos_token_ids": frozenset({1, 2}), "min_new_tokens": 1}
    seat(sampler, [(SamplingParams(logit_bias=bias), {})])
    with pytest.raises(ValueError, match=r"17 logit biases, .* a row has room for 16"):
        seat(sampler, [(SamplingParams(logit_bias=bias), ends)])


# -- top tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [random_logits, halves, with_holes])
def test_top_tokens_are_those_of_the_specification(make: Callable):
    vocab = 100
    rows = [(SamplingParams(logit_bias={5: 100.0}), {"top_n": n}) for n in (0, 1, 3, 64)]
    rows.append((sampled(), {"top_n": 20}))
    logits = make(len(rows), vocab, seed=3)
    logits[2, 7] = float("nan")
    want = on_cpu(rows, vocab).sample(logits, list(range(len(rows))), [0] * len(rows))
    got = step(on_device(rows, vocab), logits)
    expected = {at: (ids, values) for at, ids, values in want.tops}
    assert set(expected) == {1, 3, 4}
    for at in range(len(rows)):
        ids, values = expected.get(at, ([], []))
        assert got.top_ids[at].tolist() == ids + [-1] * (64 - len(ids))
        assert got.top_logprobs[at].tolist() == pytest.approx(
            values + [0.0] * (64 - len(ids)), rel=1e-5, abs=1e-5
        )


@pytest.mark.parametrize("make", [halves, with_holes])
def test_ranks_are_those_of_the_specification(make: Callable):
    vocab, biased = 100, SamplingParams(logit_bias={5: 100.0})
    rows = [(biased, {}), (biased, {"ranks": True}), (sampled(temperature=5.0), {"ranks": True})]
    rows.append((SamplingParams(), {"ranks": True, "top_n": 2}))
    logits = make(len(rows), vocab, seed=3)
    want = on_cpu(rows, vocab).sample(logits, list(range(len(rows))), [0] * len(rows))
    got = step(on_device(rows, vocab), logits)
    assert want.ranks is not None
    assert got.ranks is not None
    assert got.ranks.tolist() == want.ranks.tolist()
    drawn = logits.gather(1, want.tokens[:, None])
    expected = ((logits > drawn).sum(1) + 1).tolist()
    assert want.ranks.tolist() == [0, *expected[1:]]
    assert expected[3] == 1
    logits[2, 7] = float("nan")
    assert step(on_device(rows, vocab), logits).ranks.tolist()[2] == 0


def test_a_vocabulary_smaller_than_the_top_is_reported_whole():
    samples = step(on_device([(SamplingParams(), {"top_n": 20})], 2), torch.tensor([[1.0, 0.0]]))
    assert samples.top_ids[0, :3].tolist() == [0, 1, -1]


# -- distribution ------------------------------------------------------------------------------


@pytest.mark.gpu
def test_draws_follow_the_distribution():
    logits = torch.linspace(1.0, -1.0, 6)
    sampler = on_device([(sampled(seed=row, temperature=0.8), {}) for row in range(64)], 6)
    observed = np.zeros(6)
    for position in range(6):
        tokens = step(sampler, logits.expand(64, -1).contiguous(), position).tokens
        observed += np.bincount(tokens.numpy(), minlength=6)
    expected = 384 * (logits / 0.8).softmax(0).numpy()
    # Chi-square with 5 degrees of freedom passes 30 once in 60,000 times; uniform draws have 370.
    assert ((observed - expected) ** 2 / expected).sum() < 30


# -- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("make", [random_logits, halves, wide])
def test_a_large_vocabulary_draws_the_same_tokens(make: Callable):
    rows = ALONE + mixtures(64, 128_256, seed=0)
    steps = [make(len(rows), 128_256, seed=t) for t in range(3)]
    same_tokens(rows, steps, SamplerTiles())
