"""Whole models through the engine on a device, beside what transformers makes of them there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from support.engines.engine_link import Client
from support.kernels.interpreted import DEVICE
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import assemble
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

ROWS, POSITIONS, PREFILL, NEW_TOKENS = 8, 1024, 192, 40

#: Of all models here.
VOCABULARY = 4096

#: Makes transformers' model of a type.
Peer = Callable[[torch.dtype], nn.Module]


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


def random_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def serve(
    folder: Path,
    prompts: list[list[int]],
    kv_cache_dtype: str = "auto",
    memory_fraction: float = 0.01,
) -> Served:
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
    assert not client.failures, client.failures
    return Served(prompts, client, made.slots)


def peer_of(folder: Path) -> Peer:
    """transformers' model of a checkpoint that it knows."""

    def load(dtype: torch.dtype) -> nn.Module:
        # Where transformers chooses sdpa, it leaves a soft cap of scores out.
        capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None)
        attention = "eager" if capped else None
        # Loaded anew: a model that is cast has cast its rotary frequencies, too.
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention
        )
        return model.to(DEVICE).eval()

    return load


def logprobs_by(model: nn.Module, tokens: list[int]) -> torch.Tensor:
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

    def check(self, most: float = 1.1) -> None:
        """Rounding in bfloat16 errs no more than transformers' does, or so many times that."""
        assert 0 < self.error <= most * self.peer_error, self
        # Where two tokens are about as probable, rounding chooses.
        assert self.lost <= 2 * self.largest_peer_error


def compare(served: Served, make_peer: Peer) -> Comparison:
    peer, exact = make_peer(torch.bfloat16), make_peer(torch.float32)
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
