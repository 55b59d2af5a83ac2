"""What a draft model brings on one GPU, its own time included, at an acceptance that is set.

    python -P benchmarks/gpu_draft_model.py [--draft 150m] [--right 0.75] [--speculate 8]

The served model is that of gpu_drafts.py, an 8B Llama shape that says t + 1 after token t. The
draft model has random weights of a small shape and the same head, but that after a set share of all
tokens, drawn at random, it says something else: so each draft is right by chance, independently of
the others. Everything that a draft model costs is there: its forward pass beside each step, its
small steps, its head, its draws. The aim is 2.0 at batch 1 and three tokens of four. `eagle3` is a
head of the published sizes for the served model, with random weights; what it says is overruled
behind its last product, which costs one launch more. `medusa` are as many heads as --speculate says
(publishers have 3 to 5), with products over the vocabulary of their own, which are right as the
draft model's head is; `medusa-shared` go through the served model's, and are overruled.

Each case runs on two engines by turns, one of which has no draft model; ratios are of the medians
of tokens per second from the first token on. `small step`, `forward` and `drawing` are medians of
steps with drafts, in milliseconds of the GPU; `step` is from its launch to its results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import config_of, family_of, random_model
from gpu_drafts import PENALISED, SAMPLED, Client, batch

from tokenpod.core.messages import EngineOptions
from tokenpod.core.plan import StepPlan
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.assemble import Assembled, assemble
from tokenpod.engine.draft import DraftModel
from tokenpod.engine.executor import Launched, Masks, StepResult
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.memory import let_segments_grow
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.pool import KVPool
from tokenpod.kernels.registry import operations_for
from tokenpod.models.decoder import Decoder
from tokenpod.models.eagle import EagleHead, EagleSpec
from tokenpod.models.eagle import weights_of as eagle_weights
from tokenpod.models.medusa import MedusaHeads, MedusaSpec
from tokenpod.scheduler.drafting import Drafting, ModelDrafts
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.step_times import Costs

#: Few, so that few sizes of steps are captured.
POSITIONS, ROWS, PREFILL, SLOTS = 4096, 16, 256, 1 << 16

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500_000.0,
    "head_dim": 64,
}
#: Small shapes with the served model's vocabulary.
DRAFTS = {
    "150m": _LLAMA
    | {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
    },
    # That of Llama 3.2 1B.
    "1b": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
    },
}
#: That of the head published for Llama 3.1 8B.
_EAGLE = _LLAMA | {
    "head_dim": 128,
    "hidden_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
}
_EAGLE_GUESSES = 32_000
CASES = {
    "greedy 1": batch(1, SamplingParams()),
    "sampled 1": batch(1, SAMPLED),
    "penalised 1": batch(1, PENALISED),
    "greedy 4": batch(4, SamplingParams()),
    "greedy 16": batch(16, SamplingParams()),
}


@dataclass
class Timed:
    """An executor, and what its steps with drafts took."""

    executor: Any
    #: Milliseconds of a small step, of the forward pass behind them, of drawing, and of the whole
    #: step from its launch.
    steps: list[tuple[float, float, float, float]] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> Launched:
        """See `executor.Launcher`."""
        return _Timed(self, plan, self.executor.launch(plan), time.perf_counter())


@dataclass
class _Timed:
    into: Timed
    plan: StepPlan
    launched: Launched
    began: float

    def sample(self, masks: Masks) -> None:
        self.launched.sample(masks)

    def wait(self) -> StepResult:
        result = self.launched.wait()
        drafts = int(self.plan.r_samples.max(initial=0)) - 1
        if drafts > 0:
            took = 1e3 * (time.perf_counter() - self.began)
            small = result.drafting_ns / drafts / 1e6
            forward = (result.forward_ns - result.drafting_ns) / 1e6
            self.into.steps.append((small, forward, result.sample_ns / 1e6, took))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    drafts = [*DRAFTS, "eagle3", "medusa", "medusa-shared"]
    parser.add_argument("--draft", choices=drafts, default="150m")
    parser.add_argument("--right", type=float, default=0.75)
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=[*CASES])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plain, drafting = engines(options)
    results = []
    for name in options.cases:
        results.append(measure(plain, drafting, name, options))
        print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def engines(options: argparse.Namespace) -> tuple[Assembled, Assembled]:
    """Of one served model: without a draft model, and with it."""
    let_segments_grow()
    device = torch.device("cuda")
    shapes = json.loads((Path(__file__).parent / "shapes.json").read_text())
    served = counting(shapes["llama-3.1-8b"], device, wrong=0.0)
    draft: DraftModel
    if options.draft == "eagle3":
        draft = told_head(served, device, wrong=1 - options.right)
    elif options.draft.startswith("medusa"):
        own = options.draft == "medusa"
        draft = medusa_heads(served, device, options.speculate, own=own, wrong=1 - options.right)
    else:
        draft = counting(DRAFTS[options.draft], device, wrong=1 - options.right)
    asked = EngineOptions(
        model_folder="",
        dtype="bfloat16",
        device="cuda",
        threads=1,
        max_batch_size=ROWS,
        max_batch_prefill_tokens=PREFILL,
        max_batch_total_tokens=SLOTS,
    )
    plain = assemble(served, asked, positions=POSITIONS, device=device)
    fields = {name: getattr(asked, name) for name in asked.__struct_fields__}
    drafted = EngineOptions(**fields | {"speculate": options.speculate})
    return plain, assemble(served, drafted, positions=POSITIONS, device=device, draft=draft)


def counting(shape: dict[str, Any], device: torch.device, *, wrong: float) -> Decoder:
    """A model that says t + 1 after token t, and something else after this share of all tokens."""

    def count(weights: dict[str, Any]) -> None:
        weights["head"] = weights["embedding"].roll(1, 0) / 64
        weights["head"][chosen(wrong).to(device)] = 0

    return random_model(family_of(shape), config_of(shape), device, change=count)


def chosen(share: float) -> torch.Tensor:
    """[vocabulary] bool: this share of all tokens, at random."""
    chance = torch.rand(_LLAMA["vocab_size"], generator=torch.Generator().manual_seed(3))
    return chance < share


class Told(EagleHead):
    """A head whose guess is token t + 1 behind token t, or some other one."""

    wrong: torch.Tensor

    def forward(
        self, t_token: torch.Tensor, t_before: torch.Tensor, batch: ForwardBatch, pool: KVPool
    ) -> torch.Tensor:
        self._next = t_token + 1
        return super().forward(t_token, t_before, batch, pool)

    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        logits = super().logits(stream)
        return logits.scatter_(1, self._next[:, None], self.wrong[self._next][:, None])


def told_head(served: Decoder, device: torch.device, wrong: float) -> Told:
    """A head of random weights that is wrong behind this share of all tokens."""
    spec = EagleSpec(config_of(_EAGLE), _EAGLE_GUESSES, served.config.hidden_size)
    torch.manual_seed(1)
    weights: dict[str, Any] = {
        weight.name: torch.empty(weight.shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
        for weight in eagle_weights(spec, "")
    }
    guesses = torch.randperm(spec.vocab_size)[:_EAGLE_GUESSES].sort().values
    ops = operations_for(device, torch.bfloat16)
    head = Told(spec, weights, ops, served, guesses)
    scores = torch.where(chosen(wrong), -torch.inf, 1e4)
    head.wrong = scores.to(device, torch.bfloat16)
    return head


class ToldHeads(MedusaHeads):
    """Heads whose guesses are the tokens that come, or some other ones."""

    wrong: torch.Tensor

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, heads: int) -> torch.Tensor:
        logits = super().logits(hidden, heads)
        # Their blocks add nothing: all say what the served model says, and count on from there.
        places = torch.arange(1, heads + 1, device=hidden.device).repeat_interleave(len(hidden))
        following = logits.argmax(1) + places
        return logits.scatter_(1, following[:, None], self.wrong[following][:, None])


def medusa_heads(
    served: Decoder, device: torch.device, heads: int, *, own: bool, wrong: float
) -> MedusaHeads:
    """Heads of one block each, which are wrong behind this share of all tokens."""
    config = served.config
    width, tokens = config.hidden_size, config.vocab_size
    spec = MedusaSpec(heads, 1, width, tokens if own else None, tokens, None, None, ())
    kind = {"device": device, "dtype": torch.bfloat16}
    weights: dict[str, Any] = {}
    for i in range(heads):
        weights[f"{i}.0"] = torch.zeros(width, width, **kind)
        weights[f"{i}.0_bias"] = torch.zeros(width, **kind)
        if own:
            table = served.embed_tokens(torch.arange(tokens, device=device))
            weights[f"{i}.head"] = table.roll(2 + i, 0) / 64
            weights[f"{i}.head"][chosen(wrong).to(device)] = 0
    ops = operations_for(device, torch.bfloat16)
    if own:
        return MedusaHeads(spec, heads, weights, ops, served)
    told = ToldHeads(spec, heads, weights, ops, served)
    told.wrong = torch.where(chosen(wrong), -torch.inf, 1e4).to(device, torch.bfloat16)
    return told


def measure(
    plain: Assembled, drafting: Assembled, name: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One case, with and without drafts by turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    drafted = accepted = 0
    timed, costs = Timed(drafting.executor), Costs()
    for turn in range(options.rounds + 1):
        for drafts in (True, False) if turn % 2 else (False, True):
            made = drafting if drafts else plain
            executor = timed if drafts else plain.executor
            rate, client = answer(made, executor, name, turn, costs, options)
            if turn:  # the first one warms up
                rates[drafts].append(rate)
                drafted, accepted = drafted + client.drafted, accepted + client.accepted
            else:
                timed.steps.clear()
    with_drafts, without = (statistics.median(rates[drafts]) for drafts in (True, False))
    found = {
        "case": name,
        "draft": options.draft,
        "tokens/s": round(with_drafts, 1),
        "without": round(without, 1),
        "ratio": round(with_drafts / without, 3),
        "pairs": [round(a / b, 3) for a, b in zip(rates[True], rates[False], strict=True)],
        "drafted": drafted,
        "accepted": round(accepted / drafted, 3) if drafted else None,
    }
    if timed.steps:
        small, forward, drawing, step = (
            statistics.median(each) for each in zip(*timed.steps, strict=True)
        )
        found |= {
            "small step": round(small, 3),
            "forward": round(forward, 3),
            "drawing": round(drawing, 3),
            "step": round(step, 3),
        }
    return found


def answer(
    made: Assembled,
    executor: Any,
    name: str,
    seed: int,
    costs: Costs,
    options: argparse.Namespace,
) -> tuple[float, Client]:
    """Tokens per second of one case; `costs`: what is known of steps by then, as in a server."""
    made.executor.release(range(ROWS + 1))
    requests = CASES[name](seed)
    client = Client(requests)
    limits = Limits(made.slots, ROWS, POSITIONS, PREFILL)

    def drafting(kv: Any) -> Drafting:
        return Drafting(ModelDrafts(), options.speculate, kv, costs)

    chosen = drafting if isinstance(executor, Timed) else None
    scheduler = Scheduler(limits, drafting=chosen)
    loop = EngineLoop(client, scheduler, executor, overlap=made.overlap)  # type: ignore[arg-type]
    while client.started < len(requests):
        loop.turn()
    began, before = time.perf_counter(), client.tokens
    while client.left:
        loop.turn()
    torch.cuda.synchronize()
    return (client.tokens - before) / (time.perf_counter() - began), client


if __name__ == "__main__":
    main()
