"""What a GPU's sampler takes: for each row and vocabulary entry 4 bytes, and 8 while it draws."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenpod.core.new_row import NewRow
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.gpu.device_sampler import DeviceSampler

#: Of what does not grow with the vocabulary, and of parts of it: splits' sums, words, edits.
SMALL = 0.5


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or storage.nbytes() < 64:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


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
    with Alive() as alive:
        sampler = DeviceSampler(
            rows=rows, vocab_size=vocabulary, device=torch.device("cpu"), most_edits=4
        )
        sampler.set_rows(range(rows), [row() for _ in range(rows)])
        kept = alive.now
        assert 4 * entries <= kept < (4 + SMALL) * entries
        alive.most = kept
        draw(sampler, logits)
        # Interpreted kernels keep no tensors of their own.
        assert 8 * entries <= alive.most - kept < (8 + SMALL) * entries
        assert alive.now - kept < SMALL * entries


@pytest.mark.gpu
def test_a_step_takes_no_more_where_its_layers_have_taken_as_much():
    rows, vocabulary, device = 256, 128_256, torch.device("cuda")
    entries = rows * vocabulary
    logits = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16)
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
