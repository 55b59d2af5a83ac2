"""Models on the kernels of a GPU say what transformers says: experts, and all kinds of layers."""

from __future__ import annotations

import pytest
import torch

from support.kernels.interpreted import DEVICE
from support.steps.ranks import interpreted_operations
from tokenpod.kernels.backends import triton
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.batch import ForwardBatch, PagedRows
from tokenpod.models import load as loading
from tokenpod.models.load import load_model

FIRST_SLOT = 3


@pytest.fixture
def load_on_device(monkeypatch):
    """Loads a folder for Triton's operations, interpreted or not."""
    monkeypatch.setattr(loading, "operations_for", lambda device: triton.OPERATIONS)

    def load(folder):
        return load_model(folder, dtype=None, device=DEVICE, progress=lambda done, total: None)

    return load


def integers(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def prompt_step(tokens):
    """One row, whole."""
    count = len(tokens)
    return ForwardBatch(
        t_token=integers(tokens, torch.int64),
        t_place=torch.arange(count, device=DEVICE),
        t_slot=torch.arange(count, device=DEVICE) + FIRST_SLOT,
        b_start=[0, count],
        b_context=[count],
        b_runs=[[(FIRST_SLOT, FIRST_SLOT + count)]],
        b_row=[0],
        row_table=integers([range(FIRST_SLOT, FIRST_SLOT + 64)]),
        single_rows=0,
        logit_index=torch.arange(count, device=DEVICE),
        paged=PagedRows(integers([0]), integers([0, count]), integers([count])),
    )


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-some-dense"])
def test_a_prompts_logprobs(name, golden, load_on_device, text):
    reference = golden(name)
    agree(load_on_device(reference.folder), reference, text(9))


#: Kinds whose layers have what no other's here have: interpreted they take seconds each.
ON_GPUS = ["olmo2-varied", "nemotron-varied", "granite-varied", "cohere-varied", "gemma3-varied"]


@pytest.mark.compute
@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize(
    "name",
    [
        *("opt-350m", "gpt-neox", "gemma2", "bloom-odd-heads", "stablelm-varied", "ministral3"),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_GPUS),
    ],
)
def test_layers_of_other_shapes(name, golden, monkeypatch, text):
    """With plain products: interpreted, ours take minutes, and have tests of their own."""
    monkeypatch.setattr(loading, "operations_for", lambda device: interpreted_operations())
    reference = golden(name)
    model = load_model(
        reference.folder,
        dtype=None,
        device=DEVICE,
        progress=lambda done, total: None,
        max_total_tokens=64,
    )
    agree(model, reference, text(12))


def agree(model, reference, tokens):
    config = model.config
    pool = KVPool(
        slots=64,
        layouts=config.kv_layouts,
        dtype=model.dtype,
        device=DEVICE,
    )
    hidden = model.forward(prompt_step(tokens), pool)
    got = model.logits(hidden).float().log_softmax(-1).cpu()
    torch.testing.assert_close(got, reference.logprobs(tokens), rtol=0, atol=1e-4)
