"""Texts that are read for their vectors by a GPU's executor, with steps that overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.checkpoints.embedding_models import VOCABULARY, EmbeddingGolden
from support.engines.engine_link import Client
from support.kernels.interpreted import DEVICE
from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.core.requests import PoolingParams, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.gpu.device_executor import DeviceExecutor
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod.engine.loop import EngineLoop
from tokenpod.kernels.backends import reference, triton
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.folder import read_layout
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.pooling.head import PoolingHead
from tokenpod.models.weights.shard import WHOLE
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = pytest.mark.compute

ROWS, SLOTS, POSITIONS = 4, 300, 64

#: Interpreted, products take minutes; they have their own tests.
OPERATIONS = triton.OPERATIONS
if DEVICE.type == "cpu":
    OPERATIONS = replace(
        triton.OPERATIONS,
        rotate=reference.OPERATIONS.rotate,
        store_key_value=reference.OPERATIONS.store_key_value,
        prepare_linear=reference.OPERATIONS.prepare_linear,
        prepare_norm_linear=reference.OPERATIONS.prepare_norm_linear,
        prepare_add_linear=reference.OPERATIONS.prepare_add_linear,
    )


@pytest.mark.parametrize(
    ("kind", "prefill", "captured"),
    [
        ("minilm", 64, False),
        ("minilm", 64, True),
        ("mpnet", 64, True),
        ("gte-modernbert", 64, True),
        ("qwen3-mean", 10, False),
        ("qwen3-mean", 10, True),
    ],
)
def test_vectors_are_those_of_the_modules(tmp_path, kind, prefill, captured):
    golden = EmbeddingGolden(kind, tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        layout = read_layout(tmp_path, checkpoint)
        tensors = read_weights(
            checkpoint,
            layout.weights,
            dtype=torch.float32,
            device=DEVICE,
            progress=lambda done, total: None,
            shard=WHOLE,
            reader=None,
        )
    model = Decoder(layout.spec, tensors, OPERATIONS, pooling=PoolingHead(layout.pooling))
    pool = model.pool_class(
        slots=SLOTS, layouts=model.config.kv_layouts, dtype=torch.float32, device=DEVICE
    )
    executor = DeviceExecutor(
        model,
        pool,
        DeviceSampler(rows=ROWS + 1, vocab_size=VOCABULARY, device=DEVICE, most_edits=4),
        rows=ROWS + 1,
        max_positions=POSITIONS,
        max_tokens=prefill + PROBE_TOKENS + ROWS + 1,
        device=DEVICE,
    )
    if captured:
        executor.capture()
    encodes = model.config.encodes
    limits = Limits(
        SLOTS - PROBE_TOKENS, ROWS, POSITIONS, prefill, pools=True, whole_prompts=encodes
    )
    generator = torch.Generator().manual_seed(3)
    lengths = (9, 1, 30, 4, 17, 2, 1)
    texts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    client = Client(
        Request([i], text, SamplingParams(), StoppingParams(1), pooling=PoolingParams())
        for i, text in enumerate(texts)
    )
    loop = EngineLoop(client, Scheduler(limits), executor, overlap=True)
    for _ in range(100):
        loop.turn()
        if not client.left:
            break
    assert not client.left
    assert not client.failures
    for i, text in enumerate(texts):
        got = torch.from_numpy(client.vectors[i][0].copy())
        torch.testing.assert_close(got, golden.vector(text), rtol=2e-4, atol=5e-5)
