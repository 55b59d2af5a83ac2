"""Rows that go on from states: an executor of a GPU, captured steps too, says what a CPU's says."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import msgspec
import pytest
import torch

from support.engines import constrained
from support.engines.engine_link import Client
from support.engines.guessing import drafting
from support.kernels.interpreted import DEVICE
from tokenpod.core.constraints import Regex
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.own_state import OwnState
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.gpu.device_executor import DeviceExecutor
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.room import no_prefix_cache
from tokenpod.kernels.backends import cpu, reference, triton
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.families import FAMILIES
from tokenpod.models.specs.weight_table import weights_of
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = pytest.mark.compute

CPU = torch.device("cpu")
ROWS, SLOTS, POSITIONS, PREFILL, VOCABULARY, DRAFTS = 3, 200, 40, 8, 97, 3


#: By the kind of the layer with states; the other has keys and values, too, but where none has.
KINDS = {
    "delta net": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "state space": {
        "architectures": ["FalconH1ForCausalLM"],
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "no keys": {
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
    },
    "convolution": {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}
#: Kind, drafts, and whether steps are captured: what every test run tries.
QUICK = {
    ("delta net", DRAFTS, True),
    ("state space", DRAFTS, False),
    ("convolution", DRAFTS, True),
}


def spec(kind="delta net", vocab_size=VOCABULARY, positions=POSITIONS):
    """Of two layers."""
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        **KINDS[kind],
    }
    return family_of(fields["architectures"][0]).spec(Fields(fields, "a test's"), None)


def family_of(architecture):
    return next(x for x in FAMILIES if architecture in x.architectures)


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


def model(ops, device, config):
    generator = torch.Generator().manual_seed(4)
    weights = {}
    names = family_of(config.architecture).names_of(config)[0]
    for weight in weights_of(config, names, "model."):
        made = torch.randn(weight.shape, generator=generator) * 0.3
        weights[weight.name] = made.to(device)
    return Decoder(config, weights, ops)


def pool(made, device, slots=SLOTS, rows=ROWS):
    layouts = made.config.kv_layouts
    held = made.pool_class(slots=slots, layouts=layouts, dtype=torch.float32, device=device)
    held.reserve(rows + 1)
    return held


def said(executor, requests, overlap, drafting=None):
    """Each sequence's tokens."""
    limits = Limits(
        slots=SLOTS - PROBE_TOKENS,
        max_rows=ROWS,
        max_positions=POSITIONS,
        prefill_tokens=PREFILL,
        sharing=False,
    )
    client = Client(requests)
    loop = EngineLoop(client, Scheduler(limits, drafting=drafting), executor, overlap=overlap)
    while client.left:
        loop.turn()
    assert not client.failures
    assert (client.accepted > 10) == (drafting is not None)
    return client.tokens


def requests():
    """More than there are rows, so that rows are taken again; prompts longer than a step's."""
    generator = torch.Generator().manual_seed(3)
    lengths = (7, 1, 18, 2)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    stopping = StoppingParams(max_new_tokens=8)
    return [Request([i], prompt, SamplingParams(), stopping) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected():
    """By kind."""

    @functools.cache
    def tokens(kind):
        made = model(cpu.OPERATIONS, CPU, spec(kind))
        executor = CpuExecutor(made, pool(made, CPU), rows=ROWS + 1, vocab_size=VOCABULARY)
        return said(executor, requests(), overlap=False)

    return tokens


# Interpreted, the large kernels take half a minute: by default each runs in one of its forms.
@pytest.mark.parametrize(
    ("kind", "drafts", "captured"),
    [
        pytest.param(
            kind,
            drafts,
            captured,
            id=f"{kind}-{drafts}-{'captured' if captured else 'launched'}",
            marks=() if (kind, drafts, captured) in QUICK else pytest.mark.slow,
        )
        for kind, drafts in itertools.product(KINDS, (0, DRAFTS))
        for captured in (False, True)
    ],
)
def test_tokens_are_those_of_a_cpu(expected, kind, drafts, captured):
    """With drafts that are right, and with some that are wrong."""
    made = model(OPERATIONS, DEVICE, replace(spec(kind), drafts=drafts))
    executor = DeviceExecutor(
        made,
        pool(made, DEVICE),
        DeviceSampler(rows=ROWS + 1, vocab_size=VOCABULARY, device=DEVICE, most_edits=4),
        rows=ROWS + 1,
        max_positions=POSITIONS,
        max_tokens=PREFILL + PROBE_TOKENS + ROWS * drafts,
        device=DEVICE,
        drafts=ROWS * drafts,
        flat=False,
    )
    if captured:
        executor.capture()
    asked, guesses = requests(), None
    if drafts:
        asked = [msgspec.structs.replace(x, drafts=drafts) for x in asked]
        guesses = drafting(expected(kind), "random", drafts, VOCABULARY)
    assert said(executor, asked, overlap=True, drafting=guesses) == expected(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_late_masks_change_no_token(kind):
    """A row whose mask is late computes its last token again: its states are one ahead."""
    made = model(cpu.OPERATIONS, CPU, spec(kind, constrained.VOCABULARY, constrained.POSITIONS))
    wanted = Regex("[a-z ]{20,60}")
    said = []
    for late in (0.0, 0.4):
        held = pool(made, CPU, slots=600, rows=8)
        executor = CpuExecutor(made, held, rows=9, vocab_size=constrained.VOCABULARY)
        client = constrained.Client(
            [
                constrained.ask(
                    i, wanted, new=30, prompt=range(5, 8 + i), reports={"logprobs": True}
                )
                for i in range(5)
            ]
        )
        constrained.serve(
            made, client, executor=executor, late=late, slots=600, forced=0, sharing=False
        )
        assert not client.failures
        said.append(client)
    prompt, late = said
    assert prompt.tokens == late.tokens
    assert sum(map(len, prompt.tokens.values())) > 50
    for i, logprobs in prompt.logprobs.items():
        assert late.logprobs[i] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("asked", "own", "snapshots", "said"),
    [
        ({}, None, 0, ""),
        ({}, OwnState(1, 0, pooled=True), 8, ""),
        ({}, OwnState(1, 0, pooled=True), 0, "no memory for snapshots"),
        ({}, OwnState(1, 0), 0, "caches of their own"),
        ({"prefix_caching": False}, None, 0, "--no-prefix-caching"),
    ],
)
def test_why_no_prefixes_are_cached_is_said(asked, own, snapshots, said):
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cpu",
        threads=1,
        max_batch_size=1,
        max_batch_prefill_tokens=8,
        **asked,
    )
    found = no_prefix_cache(options, own, snapshots)
    assert said in found
    assert bool(said) == bool(found)
