"""Sampling equals the reference, and no row notices the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.examples import examples
from support.sampling.samplers import set_row
from support.sampling.sampling_reference import choose
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.cpu.cpu_sampler import CpuSampler
from tokenpod.engine.sampling.sampler import Samples, logprobs_of

INF = float("inf")


def draw(logits: torch.Tensor, *rows: tuple[SamplingParams, dict], position: int = 0) -> Samples:
    """One step of fresh rows."""
    sampler = CpuSampler(rows=len(rows), vocab_size=logits.shape[1])
    for row, (params, changes) in enumerate(rows):
        set_row(sampler, row, params, **changes)
    return sampler.sample(logits, list(range(len(rows))), [position] * len(rows))


def one(logits: list[float] | torch.Tensor, params: SamplingParams, **changes: object) -> Samples:
    return draw(torch.as_tensor(logits, dtype=torch.float32)[None], (params, changes))


def random_logits(n: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def shares() -> st.SearchStrategy[float]:
    return st.one_of(st.just(1.0), st.floats(0.01, 0.99))


def all_params(vocab: int) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        do_sample=st.booleans(),
        temperature=st.sampled_from([1.0, 0.1, 0.7, 2.5]),
        top_k=st.sampled_from([0, 1, 2, 7, vocab, vocab + 1]),
        top_p=shares(),
        min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
        typical_p=shares(),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
        presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
        relative_frequency_penalty=st.sampled_from([0.0, 2.0]),
        logit_bias=st.dictionaries(
            st.integers(0, vocab - 1), st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=3
        ),
        watermark=st.booleans(),
        allowed_token_ids=st.just([]) | st.lists(st.integers(0, vocab - 1), max_size=4),
        eos_boost_after=st.integers(0, 3),
        eos_boost_factor=st.sampled_from([1.0, 1.0, 1.2, 40.0]),
        bad_words=st.lists(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=3), max_size=3),
        seed=st.integers(0, 2**64 - 1),
    )


@st.composite
def cases(draw: st.DrawFn) -> dict:
    vocab = draw(st.integers(2, 50))
    # Halves tie often.
    score = st.one_of(
        st.integers(-8, 8).map(lambda half: half / 2),
        st.sampled_from([1e4, -1e4, -INF]),
        st.floats(-20, 20, width=32),
    )
    logits = draw(st.lists(score, min_size=vocab, max_size=vocab))
    if max(logits) == -INF:
        logits[0] = 0.0
    token, params = st.integers(0, vocab - 1), draw(all_params(vocab))
    if params.allowed_token_ids and max(logits[t] for t in params.allowed_token_ids) == -INF:
        logits[params.allowed_token_ids[0]] = 0.0
    free = {*(params.allowed_token_ids or range(vocab))} - {word[-1] for word in params.bad_words}
    assume(any(logits[t] > -INF for t in free))
    return {
        "logits": np.array(logits, dtype=np.float32),
        "params": params,
        "prompt": draw(st.lists(token, min_size=1, max_size=8)),
        "outputs": draw(st.lists(token, max_size=8)),
        "stream": draw(st.integers(0, 2**32 - 1)),
        "eos": draw(st.frozensets(token, max_size=2)),
    }


def check_against_reference(case: dict) -> None:
    logits, params, eos = case["logits"], case["params"], case.get("eos", frozenset())
    context = {key: case[key] for key in ("prompt", "outputs", "stream")}
    expected = choose(logits, params, **context, eos=eos)
    row = (params, {**context, "logprobs": True, "eos_token_ids": eos})
    samples = draw(torch.from_numpy(logits)[None], row, position=len(case["outputs"]))
    token = int(samples.tokens[0])
    # Where a cut falls between two sums that rounding can swap, float32 may keep one token more.
    size = 100 + float(np.abs(logits[np.isfinite(logits)]).max()) * params.repetition_penalty
    rounding = (1 + size / params.temperature) * 1e-6
    if expected.margin < rounding:
        return
    assert expected.fitness[token] >= expected.fitness.max() - 4 * rounding
    assert float(samples.logprobs[0]) == pytest.approx(
        expected.logprobs[token], rel=1e-5, abs=4 * rounding
    )


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(cases())
def test_any_parameters_on_small_vocabularies_equal_the_reference(case):
    check_against_reference(case)


LARGE = [
    SamplingParams(),
    SamplingParams(do_sample=True),
    SamplingParams(do_sample=True, temperature=0.8, top_p=0.9),
    SamplingParams(do_sample=True, top_k=50, repetition_penalty=1.1),
    SamplingParams(do_sample=True, top_k=1000, top_p=0.95, min_p=0.01, typical_p=0.8),
    SamplingParams(do_sample=True, typical_p=0.5, frequency_penalty=0.5),
    SamplingParams(do_sample=True, min_p=0.05, watermark=True),
]


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("at", range(len(LARGE)))
def test_a_vocabulary_of_32000_equals_the_reference(at, scale):
    logits = random_logits(1, 32_000, seed=at, scale=scale).round(decimals=1)  # with ties
    check_against_reference(
        {
            "logits": logits[0].numpy(),
            "params": LARGE[at],
            "prompt": [3, 4, 31_999],
            "outputs": [4],
            "stream": 2,
        }
    )


# -- rows are alone ----------------------------------------------------------------------------

MIXED = [
    (SamplingParams(), {}),
    (SamplingParams(do_sample=True, seed=1), {}),
    (SamplingParams(do_sample=True, temperature=0.7, seed=2), {"stream": 3}),
    (SamplingParams(do_sample=True, top_k=40, seed=3), {}),
    (SamplingParams(do_sample=True, top_p=0.9, seed=4), {}),
    (SamplingParams(do_sample=True, typical_p=0.7, seed=5), {}),
    (SamplingParams(do_sample=True, min_p=0.02, top_k=300, top_p=0.95, seed=6), {}),
    (SamplingParams(repetition_penalty=1.3, logit_bias={3: 2.0}), {"prompt": [1, 2, 3]}),
    (SamplingParams(do_sample=True, frequency_penalty=0.4, seed=7), {"outputs": [5, 5]}),
    (SamplingParams(do_sample=True, watermark=True, seed=8), {"top_n": 5}),
    (SamplingParams(), {"eos_token_ids": frozenset({2}), "min_new_tokens": 9}),
]


def bits(samples: Samples, at: int) -> tuple:
    tops = [(ids, values) for index, ids, values in samples.tops if index == at]
    return int(samples.tokens[at]), int(samples.logprobs[at].view(torch.int32)), tops


# Beyond 32,768 elements torch splits a row among its threads.
@pytest.mark.parametrize("vocab", [17, 1003, 50_001])
def test_token_and_logprob_bits_do_not_depend_on_the_batch(vocab):
    logits = random_logits(len(MIXED), vocab)
    together = draw(logits, *MIXED, position=1)
    order = np.random.default_rng(0).permutation(len(MIXED)).tolist()
    permuted = draw(logits[order], *(MIXED[i] for i in order), position=1)
    for i, row in enumerate(MIXED):
        alone = bits(draw(logits[i : i + 1], row, position=1), 0)
        assert alone == bits(together, i)
        assert alone == bits(permuted, order.index(i))


@pytest.mark.parametrize("poison", [float("nan"), INF, None])
def test_a_row_that_holds_nan_or_inf_is_marked_and_no_other_changes(poison):
    logits = random_logits(len(MIXED), 1003)
    clean = draw(logits, *MIXED)
    for spoiled in range(len(MIXED)):
        dirty = logits.clone()
        dirty[spoiled, 7] = 0.0 if poison is None else poison
        if poison is None:
            dirty[spoiled] = -INF
        samples = draw(dirty, *MIXED)
        assert (int(samples.tokens[spoiled]), float(samples.logprobs[spoiled])) == (-1, 0.0)
        assert spoiled not in [at for at, _, _ in samples.tops]
        for i in range(len(MIXED)):
            assert i == spoiled or bits(samples, i) == bits(clean, i)


def test_logits_are_left_as_they_were():
    logits = random_logits(len(MIXED), 100)
    before = logits.clone()
    draw(logits, *MIXED)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [params for params, _ in MIXED])
def test_a_resumed_sequence_goes_on_as_if_never_interrupted(params):
    vocab, steps = 60, 12
    logits = random_logits(steps, vocab, scale=1.0)
    whole = CpuSampler(rows=1, vocab_size=vocab)
    set_row(whole, 0, params, prompt=[7, 8])
    tokens = [int(whole.sample(logits[t : t + 1], [0], [t]).tokens[0]) for t in range(steps)]
    resumed = CpuSampler(rows=3, vocab_size=vocab)
    set_row(resumed, 2, params, prompt=[7, 8], outputs=tokens[:5])
    rest = [int(resumed.sample(logits[t : t + 1], [2], [t]).tokens[0]) for t in range(5, steps)]
    assert rest == tokens[5:]


def test_a_row_taken_again_knows_nothing_of_its_last_sequence():
    params = SamplingParams(repetition_penalty=5.0)
    sampler = CpuSampler(rows=1, vocab_size=3)
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    set_row(sampler, 0, params, prompt=[0])
    assert int(sampler.sample(logits, [0], [0]).tokens[0]) == 1
    assert int(sampler.sample(logits, [0], [1]).tokens[0]) == 2
    sampler.clear_row(0)
    set_row(sampler, 0, params, prompt=[0])
    assert int(sampler.sample(logits, [0], [0]).tokens[0]) == 1


# -- single rules ------------------------------------------------------------------------------


def test_nothing_left_to_draw_is_marked_like_a_bad_row():
    ends = {"eos_token_ids": frozenset({0, 1}), "min_new_tokens": 1}
    for params in (SamplingParams(), SamplingParams(do_sample=True, top_k=1)):
        assert int(one([1.0, 2.0], params, **ends).tokens[0]) == -1


@pytest.mark.parametrize("extra", [{}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_the_smallest_temperature_is_greedy(extra):
    params = SamplingParams(do_sample=True, temperature=1e-45, **extra)
    samples = one([1.0, 3.0, 2.999, -INF], params)
    assert (int(samples.tokens[0]), float(samples.logprobs[0])) == (1, 0.0)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(do_sample=True, temperature=0.0), SamplingParams(do_sample=True, min_p=1.5)],
)
def test_parameters_that_leave_no_distribution_are_refused(params):
    with pytest.raises(AssertionError):
        one([1.0, 2.0], params)


@pytest.mark.parametrize("do_sample", [False, True])
def test_min_new_tokens_bans_ends_and_stop_tokens_until_it_is_reached(do_sample):
    logits = torch.tensor([[9.0, 8.0, -5.0]])
    row = (
        SamplingParams(do_sample=do_sample, temperature=0.01),
        {"eos_token_ids": {0}, "stop_token_ids": {1}, "min_new_tokens": 2},
    )
    assert [int(draw(logits, row, position=t).tokens[0]) for t in range(4)] == [2, 2, 0, 0]


def test_neutral_parameters_change_no_bit():
    logits = random_logits(1, 5000, scale=20.0)[0]
    plain = one(logits, SamplingParams())
    # A stop token far below the rest, banned, turns the long way on.
    logits[0] = -INF
    long_way = one(logits, SamplingParams(), eos_token_ids=frozenset({0}), min_new_tokens=1)
    assert bits(one(logits, SamplingParams()), 0) == bits(long_way, 0)
    assert int(plain.tokens[0]) == int(long_way.tokens[0])


@pytest.mark.parametrize("neutral", [{"top_k": 99}, {"top_k": 100}, {"min_p": 1e-30}])
def test_truncation_that_cuts_nothing_draws_what_the_whole_vocabulary_draws(neutral):
    logits = random_logits(1, 99)[0]
    for seed in range(50):
        whole = one(logits, SamplingParams(do_sample=True, seed=seed))
        cut = one(logits, SamplingParams(do_sample=True, seed=seed, **neutral))
        assert torch.equal(whole.tokens, cut.tokens)
        assert torch.allclose(whole.logprobs, cut.logprobs, rtol=1e-6, atol=1e-6)


def test_logprobs_are_of_the_processed_scores():
    params = SamplingParams(do_sample=True, temperature=0.5, top_k=2, logit_bias={0: -100.0})
    samples = one([50.0, 1.0, 2.0, 0.0], params)
    expected = torch.tensor([2.0, 4.0]).log_softmax(0)
    token = int(samples.tokens[0])
    assert float(samples.logprobs[0]) == pytest.approx(float(expected[token - 1]), abs=1e-6)


# -- top tokens and prompts --------------------------------------------------------------------


def test_top_tokens_are_of_the_raw_logits_and_keep_all_ties_at_the_end():
    logits = [1.0, 3.0, 1.0, 2.0, 1.0, 0.0]
    params = SamplingParams(logit_bias={5: 100.0}, temperature=2.0)
    samples = one(logits, params, top_n=3)
    ((at, ids, values),) = samples.tops
    assert (at, ids, int(samples.tokens[0])) == (0, [1, 3, 0, 2, 4], 5)
    assert values == pytest.approx(torch.tensor(logits).log_softmax(0)[ids].tolist())


def test_ties_end_at_64_top_tokens_and_at_the_vocabulary():
    assert one([0.0] * 100, SamplingParams(), top_n=2).tops[0][1] == list(range(64))
    assert one([1.0, 0.0], SamplingParams(), top_n=20).tops[0][1] == [0, 1]


def test_prompt_logprobs_are_of_the_token_that_follows():
    logits = random_logits(4, 30)
    following = torch.tensor([3, 0, 29, 7])
    expected = logits.log_softmax(1)[torch.arange(4), following]
    assert torch.allclose(logprobs_of(logits, following), expected)
