"""Whole models on a GPU, through the engine, err no more than transformers does: by `-m gpu`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from interpreted import DEVICE
from transformers import AutoModelForCausalLM

from tokenpod.core.messages import EngineOptions
from tokenpod.core.outputs import StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.assemble import assemble
from tokenpod.engine.loop import EngineLoop
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = pytest.mark.gpu

ROWS, POSITIONS, PREFILL, NEW_TOKENS = 8, 1024, 192, 40

#: Large enough for the kernels and tiles that real models get.
LARGE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.04,
}
#: DeepSeek's rows and heads.
LATENT = {
    "num_key_value_heads": 16,
    "moe_intermediate_size": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GEMMA4 = {
    "head_dim": 128,
    "global_head_dim": 256,
    "sliding_window": 100,
    "vocab_size_per_layer_input": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
#: name -> (kind, more settings).
MODELS = {
    "llama": ("llama", {"head_dim": 128}),
    "llama3": ("llama-llama3", {}),
    "mistral-window": ("mistral-window", {"sliding_window": 100}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("qwen3-moe", {"moe_intermediate_size": 512}),
    "qwen2-moe": ("qwen2-moe", {"moe_intermediate_size": 512}),
    "glm4-moe": ("glm4-moe", {"head_dim": 128, "moe_intermediate_size": 512}),
    "ernie4-5-moe": ("ernie4-5-moe", {"moe_intermediate_size": 512}),
    "olmoe": ("olmoe", {"intermediate_size": 512}),
    "phimoe": ("phimoe", {"intermediate_size": 512}),
    "granite-moe": ("granite-moe", {"intermediate_size": 512}),
    "gpt-oss": ("gpt-oss", {"head_dim": 64, "intermediate_size": 512, "sliding_window": 100}),
    "deepseek-v2": ("deepseek-v2-lite", LATENT),
    "deepseek-v3": ("deepseek-v3", {**LATENT, "q_lora_rank": 384}),
    # Computed by transformers.
    "apertus": ("apertus", {"head_dim": 128}),
    "gemma4": ("gemma4-shared", GEMMA4),
    "minicpm3": ("minicpm3", {**LATENT, "kv_lora_rank": 256, "v_head_dim": 64}),
    # The same, with caches of their own.
    "qwen3-5": (
        "qwen3-5",
        {
            "head_dim": 128,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "mamba2": ("mamba2", {"num_heads": 32, "head_dim": 64, "state_size": 64}),
}


class Client:
    """The other end of an engine's link."""

    def __init__(self, requests):
        self.inbox = list(requests)
        self.left = len(self.inbox)
        self.tokens, self.logprobs = defaultdict(list), defaultdict(list)
        self.scored = {}

    def receive(self, seconds):
        del seconds
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message):
        assert isinstance(message, StepOutputs)
        assert not message.failures
        for i, sequence in enumerate(message.sequence_ids):
            self.tokens[sequence].append(message.token_ids[i])
            self.logprobs[sequence].append(message.logprobs[i])
            self.left -= message.finishes[i] != 0
        for started in message.started:
            self.scored[started.sequence_id] = started.prompt_logprobs or []


@dataclass
class Served:
    """What the engine said to each prompt, and the slots that it had."""

    prompts: list[list[int]]
    client: Client
    slots: int

    def logprobs(self, which):
        """Of all tokens of a sequence but the first."""
        client = self.client
        return torch.tensor([*client.scored[which], *client.logprobs[which]], dtype=torch.float64)


def serve(folder, prompts, kv_cache_dtype="auto", memory_fraction=0.01) -> Served:
    """Greedy, all prompts at once, their pieces mixed with decoding rows."""
    model = load_model(folder, dtype=None, device=DEVICE, progress=lambda done, total: None)
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device=DEVICE.type,
        threads=0,
        max_batch_size=ROWS,
        max_batch_prefill_tokens=PREFILL,
        memory_fraction=memory_fraction,
        kv_cache_dtype=kv_cache_dtype,
    )
    made = assemble(model, options, positions=POSITIONS, device=DEVICE)
    limits = Limits(
        slots=made.slots,
        max_rows=made.room.rows,
        max_positions=POSITIONS,
        prefill_tokens=PREFILL,
        sharing=model.config.own_state is None,
    )
    stopping = StoppingParams(max_new_tokens=NEW_TOKENS)
    client = Client(
        Request([i], prompt, SamplingParams(), stopping, logprobs=True, prompt_logprobs=True)
        for i, prompt in enumerate(prompts)
    )
    loop = EngineLoop(client, Scheduler(limits), made.executor, overlap=made.overlap)
    while client.left:
        loop.turn()
    return Served(prompts, client, made.slots)


@pytest.fixture(params=MODELS)
def reference(request, golden):
    """A checkpoint in bfloat16, by transformers."""
    kind, more = MODELS[request.param]
    return golden(kind, dtype=torch.bfloat16, **{**LARGE, **more})


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(9)
    lengths = [1, 7, 64, 300, 450]
    return [torch.randint(4096, (n,), generator=generator).tolist() for n in lengths]


def logprobs_by(model, tokens):
    """[tokens - 1, vocabulary] float64, of what follows each token but the last."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]], device=DEVICE), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


@dataclass
class Comparison:
    """With the same weights in float32, by transformers."""

    #: Root mean square errors of log probabilities: the engine's, transformers' in bfloat16.
    #: Without the largest tenth of each: where rounding chooses other experts, at tokens of its
    #: own, errors are a hundred times as large.
    error: float
    peer_error: float
    #: The largest that transformers' is, of any token of the vocabulary.
    largest_peer_error: float
    #: By how much a greedy token was less probable than the most probable one, at most.
    lost: float


def compare(served, folder) -> Comparison:
    # Loaded anew: a model that is cast has cast its rotary frequencies, too.
    peer, exact = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    ours, theirs, largest, lost = [], [], [], []
    for which, prompt in enumerate(served.prompts):
        tokens = prompt + served.client.tokens[which]
        following = torch.tensor(tokens[1:], device=DEVICE)[:, None]
        expected, peers = logprobs_by(exact, tokens), logprobs_by(peer, tokens)
        said = expected.gather(1, following)[:, 0]
        ours.append(served.logprobs(which).to(DEVICE) - said)
        theirs.append(peers.gather(1, following)[:, 0] - said)
        largest.append((peers - expected).abs().max())
        lost.append((expected.max(-1).values - said)[len(prompt) - 1 :].max())
    error, peer_error = (
        torch.cat(all_).square().sort().values[: -sum(map(len, all_)) // 10].mean().sqrt().item()
        for all_ in (ours, theirs)
    )
    return Comparison(error, peer_error, max(largest).item(), max(lost).item())


def test_logprobs_and_greedy_tokens(reference, prompts):
    got = compare(serve(reference.folder, prompts), reference.folder)
    assert 0 < got.error <= 1.1 * got.peer_error
    # Where two tokens are about as probable, rounding chooses.
    assert got.lost <= 2 * got.largest_peer_error


def test_a_cache_of_8_bits_holds_twice_as_much_and_errs_little(golden, prompts):
    reference = golden("llama", dtype=torch.bfloat16, **LARGE)
    # Too little memory for all that could be of use.
    wide, served = (
        serve(reference.folder, prompts, name, memory_fraction=1e-4)
        for name in ("auto", "fp8_e4m3")
    )
    assert served.slots == pytest.approx(2 * wide.slots, rel=0.3)
    exact, rounded = (compare(one, reference.folder) for one in (wide, served))
    assert exact.error < rounded.error < 10 * rounded.peer_error
