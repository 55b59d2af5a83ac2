"""What a GPU's sampler takes: for each row and vocabulary entry 4 bytes, and 8 while it draws."""

from __future__ import annotations

import gc

import pytest
import torch

from support.kernels.live_tensors import LiveTensors
from tokenpod.core.new_row import NewRow
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.gpu.device_sampler import DeviceSampler

#: Of what does not grow with the vocabulary, and of parts of it: splits' sums, words, edits.
SMALL = 0.5


def row() -> NewRow:
    """It samples among what top_k and top_p leave, and its history counts."""
    sampling = SamplingParams(do_sample=True, top_k=9, top_p=0.9, repetition_penalty=1.1, seed=3)
    return NewRow(Request([0], [1, 2], sampling, StoppingParams(max_new_tokens=4)), stream=0)


def draw(sampler: DeviceSampler, logits: torch.Tensor) -> None:
    rows = torch.arange(len(logits), device=logits.device)
    sampler.begin(logits, rows, torch.zeros_like(rows))
    sampler.finish(logits, rows, torch.zeros_like(rows))


@pytest.mark.compute
def test_candidates_are_there_while_tokens_are_drawn_and_no_longer():
    rows, vocabulary = 3, 30_000
    entries = rows * vocabulary
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1))
    with LiveTensors() as kept:
        sampler = DeviceSampler(
            rows=rows, vocab_size=vocabulary, device=torch.device("cpu"), most_edits=4
        )
    assert 4 * entries <= kept.most_bytes < (4 + SMALL) * entries
    sampler.set_rows(range(rows), [row() for _ in range(rows)])
    # Interpreted kernels make no tensors of their own.
    with LiveTensors() as taken:
        draw(sampler, logits)
    assert 8 * entries <= taken.most_bytes < (8 + SMALL) * entries
    with LiveTensors() as left:
        sampler.begin(logits[:1], torch.zeros(1).long(), torch.zeros(1).long())
    assert left.most_bytes < SMALL * entries


@pytest.mark.gpu
def test_a_step_takes_no_more_where_its_layers_have_taken_as_much():
    rows, vocabulary, device = 256, 128_256, torch.device("cuda")
    entries = rows * vocabulary
    logits = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16)
    # What other tests left in cycles would be given back while this one measures.
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    sampler = DeviceSampler(rows=rows, vocab_size=vocabulary, device=device, most_edits=16)
    sampler.set_rows(range(rows), [row() for _ in range(rows)])
    kept = torch.cuda.memory_allocated(device) - before
    assert 4 * entries <= kept < (4 + SMALL) * entries
    draw(sampler, logits)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    draw(sampler, logits)
    taken = torch.cuda.max_memory_allocated(device) - before - kept
    assert 8 * entries <= taken < (8 + SMALL) * entries
    # What activations have given back does for them.
    del sampler
    activations = torch.empty(9 * entries, dtype=torch.uint8, device=device)
    sampler = DeviceSampler(rows=rows, vocab_size=vocabulary, device=device, most_edits=16)
    sampler.set_rows(range(rows), [row() for _ in range(rows)])
    reserved = torch.cuda.memory_reserved(device)
    del activations
    draw(sampler, logits)
    assert torch.cuda.memory_reserved(device) == reserved
