"""Keys and values of int8 on a CPU: what the engine says over them, next to a plain pool."""

from __future__ import annotations

import statistics

import msgspec
import pytest

from support.steps import ranks
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams

OPTIONS = EngineOptions(
    model_folder="",
    dtype=None,
    device="cpu",
    threads=1,
    max_batch_size=4,
    max_batch_prefill_tokens=24,
    max_total_tokens=80,
    max_batch_total_tokens=320,
)
EIGHT_BITS = msgspec.structs.replace(OPTIONS, kv_cache_dtype="int8")

#: Log probabilities of these models, whose weights are random, deviate by more than 1. Those that
#: bfloat16 rounds differ by 0.01 to 0.05 from float32's.
MEAN_DIFFERENCE = 0.1


def requests() -> list[Request]:
    """Scored, in pieces; two samples of one prompt; a prompt that begins like another."""
    prompt, other = ([(11 * i + j * j) % 96 for j in range(40)] for i in range(2))
    ends = StoppingParams(max_new_tokens=8)
    return [
        Request([1], prompt, SamplingParams(), ends, logprobs=True, prompt_logprobs=True),
        Request([2, 3], other, SamplingParams(do_sample=True, seed=4), ends, logprobs=True),
        Request([4], [*other[:30], 7, 8], SamplingParams(), ends, logprobs=True),
    ]


# Heads in groups; a window, softcaps; ALiBi; sinks.
@pytest.mark.compute
@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "gpt-oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.sampled(5, "slow")
def test_what_is_said_is_close_to_what_a_plain_pool_says(name, dtype, golden):
    folder = golden(name).folder
    plain, said = (
        ranks.answer(folder, requests(), options, dtype=dtype) for options in (OPTIONS, EIGHT_BITS)
    )
    assert said.failures == []
    differences = [abs(x - y) for x, y in zip(said.scored[1], plain.scored[1], strict=True)]
    assert 0 < statistics.mean(differences) < MEAN_DIFFERENCE
    assert {i: len(tokens) for i, tokens in said.tokens.items()} == dict.fromkeys((1, 2, 3, 4), 8)


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_weights_in_fewer_bits_go_with_it(quantize, golden):
    folder = golden("llama").folder
    plain, said = (
        ranks.answer(folder, requests(), msgspec.structs.replace(options, quantize=quantize))
        for options in (OPTIONS, EIGHT_BITS)
    )
    assert said.failures == []
    differences = [abs(x - y) for x, y in zip(said.scored[1], plain.scored[1], strict=True)]
    assert 0 < statistics.mean(differences) < MEAN_DIFFERENCE


def test_preempted_sequences_go_on_as_they_would_have(golden):
    folder = golden("llama").folder
    usual, preempted = (
        ranks.answer(folder, requests(), EIGHT_BITS, preempt=chance) for chance in (0.0, 0.2)
    )
    assert preempted.preemptions > 0
    assert preempted.tokens == usual.tokens
