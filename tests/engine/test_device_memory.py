"""A GPU's memory is taken before the first request and never runs out: minutes, by `-m gpu`."""

from __future__ import annotations

import random

import pytest
import torch

from tokenpod.core.messages import EngineOptions
from tokenpod.core.outputs import StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import assemble
from tokenpod.engine.startup.memory import let_segments_grow
from tokenpod.kernels.backends import triton
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.families.llama import LLAMA
from tokenpod.models.specs.weight_table import weights_of
from tokenpod.models.weights.names import Names
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

STEPS = 100_000
HEAD_DIM = 64


class Crowd:
    """Clients: keeps `most` requests in the engine, made by `draw`, until `count` were made."""

    def __init__(self, draw, most, count=None):
        self.draw, self.most, self.count = draw, most, count
        self.made = self.live = self.tokens = 0

    def receive(self, seconds):
        requests = []
        while self.live < self.most and self.made != self.count:
            requests.append(self.draw(self.made))
            self.made += 1
            self.live += 1
        return requests

    def send(self, message):
        assert isinstance(message, StepOutputs)
        assert not message.failures, message.failures[0]
        self.tokens += len(message.sequence_ids)
        self.live -= sum(finish != 0 for finish in message.finishes)


def engine(crowd, *, layers, hidden, vocabulary, rows, prefill, positions, fraction):
    heads = hidden // HEAD_DIM
    config = LLAMA.spec(
        Fields(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": vocabulary,
                "hidden_size": hidden,
                "intermediate_size": 2 * hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": heads // 2,
                "head_dim": HEAD_DIM,
                "max_position_embeddings": positions,
                "torch_dtype": "bfloat16",
            },
            "a test's",
        ),
        None,
    )
    device = torch.device("cuda")
    torch.manual_seed(2)
    weights = {}
    for weight in weights_of(config, Names(), "model."):
        drawn = torch.randn(weight.shape, device=device, dtype=torch.bfloat16)
        weights[weight.name] = drawn * 0.05
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cuda",
        threads=0,
        max_batch_size=rows,
        max_batch_prefill_tokens=prefill,
        memory_fraction=fraction,
    )
    with torch.inference_mode():
        made = assemble(
            Decoder(config, weights, triton.OPERATIONS), options, positions=positions, device=device
        )
    limits = Limits(
        slots=made.slots, max_rows=rows, max_positions=positions, prefill_tokens=prefill
    )
    return EngineLoop(crowd, Scheduler(limits), made.executor, overlap=made.overlap), made.slots


@pytest.fixture(autouse=True)
def _growing_segments():
    let_segments_grow()
    torch.cuda.empty_cache()


def test_serving_allocates_nothing_over_100_000_steps():
    draw = random.Random(5)
    kinds = [
        SamplingParams(),
        SamplingParams(do_sample=True, temperature=0.8, top_p=0.9, seed=1),
        SamplingParams(do_sample=True, top_k=40, min_p=0.02, repetition_penalty=1.2, seed=2),
        SamplingParams(do_sample=True, typical_p=0.9, seed=3, top_of_processed=True),
    ]

    def request(number):
        prompt = draw.choice([1, 7, 40, 300, 900, 3000])
        return Request(
            [number],
            [draw.randrange(8192) for _ in range(draw.randrange(1, prompt + 1))],
            draw.choice(kinds),
            StoppingParams(max_new_tokens=draw.randrange(1, 900)),
            logprobs=True,
            top_n_tokens=5 if number % 50 == 0 else 0,
            prompt_logprobs=number % 40 == 0,
        )

    loop, _ = engine(
        Crowd(request, most=20), layers=2, hidden=256, vocabulary=8192, rows=16,
        prefill=2048, positions=4096, fraction=0.5,
    )  # fmt: skip
    compiled = []
    torch_triton = pytest.importorskip("triton")
    torch_triton.knobs.runtime.jit_post_compile_hook = lambda *_, **about: compiled.append(about)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    for _ in range(STEPS):
        loop.turn()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned
    assert [about.get("repr") for about in compiled] == []


@pytest.mark.fills_gpu
def test_the_worst_that_is_legal_fits():
    """As much KV as there is, all of it scored, tops and cuts over a large vocabulary."""
    rows, positions = 256, 8192

    def request(number):
        return Request(
            [number],
            [(number * 31 + i) % 128_000 for i in range(4000)],
            SamplingParams(do_sample=True, top_p=0.999, typical_p=0.99, seed=number),
            StoppingParams(max_new_tokens=60),
            logprobs=True,
            top_n_tokens=5,
            prompt_logprobs=True,
        )

    crowd = Crowd(request, most=rows, count=2 * rows)
    loop, slots = engine(
        crowd, layers=24, hidden=2048, vocabulary=128_256, rows=rows,
        prefill=8192, positions=positions, fraction=0.95,
    )  # fmt: skip
    free, total = torch.cuda.mem_get_info()
    assert free < 0.1 * total, "the pool is as large as the device allows"
    while crowd.live or crowd.made < crowd.count:
        loop.turn()
    assert crowd.tokens == 2 * rows * 60
    assert slots < rows * positions
