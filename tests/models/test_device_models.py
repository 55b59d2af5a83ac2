"""Whole models on a GPU, through the engine, err no more than transformers does: by `-m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch.cuda import mem_get_info

from support.checkpoints.device_kinds import LARGE, MODELS
from support.engines.device_models import compare, peer_of, random_prompts, serve

pytestmark = pytest.mark.gpu


@pytest.fixture(params=MODELS)
def reference(request, golden):
    """A checkpoint in bfloat16, by transformers."""
    kind, more = MODELS[request.param]
    return golden(kind, dtype=torch.bfloat16, **{**LARGE, **more})


@pytest.fixture
def prompts():
    return random_prompts([1, 7, 64, 300, 450])


def test_logprobs_and_greedy_tokens(reference, prompts):
    compare(serve(reference.folder, prompts), peer_of(reference.folder)).check()


def test_a_cache_of_8_bits_holds_twice_as_much_and_errs_little(golden, prompts):
    reference = golden("llama", dtype=torch.bfloat16, **LARGE)
    # Too little memory for all that could be of use, whatever else the GPU holds.
    wide, served = (
        serve(reference.folder, prompts, name, memory_fraction=(8 << 20) / mem_get_info()[0])
        for name in ("auto", "fp8_e4m3")
    )
    assert served.slots == pytest.approx(2 * wide.slots, rel=0.3)
    exact, rounded = (compare(one, peer_of(reference.folder)) for one in (wide, served))
    assert exact.error < rounded.error < 10 * rounded.peer_error
