"""What a draft model brings on one GPU, its own time included, at an acceptance that is set.

    python -P benchmarks/gpu_draft_model.py [--draft 150m] [--right 0.75] [--speculate 8]

The served model is that of gpu_drafts.py, an 8B Llama shape that says t + 1 after token t. The
draft model has random weights of a small shape and the same head, but that after a set share of all
tokens, drawn at random, it says something else: so each draft is right by chance, independently of
the others. Everything that a draft model costs is there: its forward pass beside each step, its
small steps, its head, its draws. The aim is 2.0 at batch 1 and three tokens of four. `eagle3` is a
head of the published sizes for the served model, with random weights; what it says is overruled
behind its last product, which costs a few launches more. `medusa` are as many heads as --speculate
says (publishers have 3 to 5), with products over the vocabulary of their own, right as the draft
model's head is; `medusa-shared` go through the served model's, and are overruled.

Each case runs on two engines by turns, one of which has no draft model; ratios are of the medians
of tokens per second from the first token on. `small step`, `forward` and `drawing` are medians of
steps with drafts, in milliseconds of the GPU; `step` is from its launch to its results, `whole`
from the results before, and `slow` which of these took more than twice as long.
"""

from __future__ import annotations

import argparse
import json
import random
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
_DEVICE = torch.device("cuda")

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
    #: Milliseconds from the results before to those of each; None: when they came.
    whole: list[float] = field(default_factory=list)
    last: float | None = None

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
        now, last = time.perf_counter(), self.into.last
        self.into.last = now if self.plan.drafts else None
        if self.plan.drafts:
            self.into.whole.append(1e3 * (now - last) if last is not None else 0.0)
            drafts = int(self.plan.r_samples.max()) - 1
            took = 1e3 * (now - self.began)
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
        for found in measure(plain, drafting, name, options):
            results.append(found)
            print(json.dumps(found), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def engines(options: argparse.Namespace) -> tuple[Assembled, Assembled]:
    """Of one served model: without a draft model, and with it."""
    served, draft = models(options)
    plain = assemble(served, _asked(), positions=POSITIONS, device=_DEVICE)
    return plain, drafting_engine(served, draft, options)


def models(options: argparse.Namespace) -> tuple[Decoder, DraftModel]:
    """The served model and the draft model."""
    let_segments_grow()
    shapes = json.loads((Path(__file__).parent / "shapes.json").read_text())
    served = counting(shapes["llama-3.1-8b"], _DEVICE)
    if options.draft == "eagle3":
        return served, told_head(served, _DEVICE, options.right)
    if options.draft.startswith("medusa"):
        own, right = options.draft == "medusa", options.right
        return served, medusa_heads(served, _DEVICE, options.speculate, own=own, right=right)
    return served, counting(DRAFTS[options.draft], _DEVICE, options.right)


def drafting_engine(served: Decoder, draft: DraftModel, options: argparse.Namespace) -> Assembled:
    """An engine with the draft model."""
    asked = _asked(speculate=options.speculate)
    return assemble(served, asked, positions=POSITIONS, device=_DEVICE, draft=draft)


def _asked(**more: Any) -> EngineOptions:
    return EngineOptions(
        model_folder="",
        dtype="bfloat16",
        device="cuda",
        threads=1,
        max_batch_size=ROWS,
        max_batch_prefill_tokens=PREFILL,
        max_batch_total_tokens=SLOTS,
        **more,
    )


def counting(shape: dict[str, Any], device: torch.device, right: float = 1.0) -> Decoder:
    """A model that says t + 1 after token t, if that is one of this share of all tokens."""

    def count(weights: dict[str, Any]) -> None:
        head = weights["embedding"].roll(1, 0) / 64
        weights["head"] = head * guessed(right).to(head)[:, None]

    return random_model(family_of(shape), config_of(shape), device, change=count)


def guessed(right: float) -> torch.Tensor:
    """[vocabulary] bool: which tokens are guessed, this share of all."""
    chance = torch.rand(_LLAMA["vocab_size"], generator=torch.Generator().manual_seed(3))
    return chance < right


class Told(EagleHead):
    """A head whose guess is token t + 1 behind token t, or some other one."""

    guessed: torch.Tensor

    def forward(
        self, t_token: torch.Tensor, t_before: torch.Tensor, batch: ForwardBatch, pool: KVPool
    ) -> torch.Tensor:
        self._next = t_token + 1
        return super().forward(t_token, t_before, batch, pool)

    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        logits = super().logits(stream)
        own = torch.where(self.guessed[self._next], 1e4, -torch.inf).to(logits)
        return logits.scatter_(1, self._next[:, None], own[:, None])


def told_head(served: Decoder, device: torch.device, right: float) -> Told:
    """A head of random weights that is right about this share of all tokens."""
    spec = EagleSpec(config_of(_EAGLE), _EAGLE_GUESSES, served.config.hidden_size)
    torch.manual_seed(1)
    weights: dict[str, Any] = {
        weight.name: torch.empty(weight.shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
        for weight in eagle_weights(spec, "")
    }
    guesses = torch.randperm(spec.vocab_size)[:_EAGLE_GUESSES].sort().values
    ops = operations_for(device, torch.bfloat16)
    head = Told(spec, weights, ops, served, guesses)
    head.guessed = guessed(right).to(device)
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
    served: Decoder, device: torch.device, heads: int, *, own: bool, right: float
) -> MedusaHeads:
    """Heads of one block each, which are right about this share of all tokens."""
    config, wrong = served.config, ~guessed(right)
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
            weights[f"{i}.head"][wrong.to(device)] = 0
    ops = operations_for(device, torch.bfloat16)
    if own:
        return MedusaHeads(spec, heads, weights, ops, served)
    told = ToldHeads(spec, heads, weights, ops, served)
    told.wrong = torch.where(wrong, -torch.inf, 1e4).to(device, torch.bfloat16)
    return told


@dataclass
class Way:
    """How requests are answered, and what came of it."""

    name: str
    drafts: bool
    costs: Costs | None = None
    rates: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    timed: Timed | None = None
    #: What answers, text after text, and its counts before the first that is measured.
    loop: EngineLoop | None = None
    before: tuple[int, int] = (0, 0)


def measure(
    plain: Assembled, drafting: Assembled, name: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One case, without drafts and with them by turns."""
    ways = [Way("without", drafts=False), Way("drafts", drafts=True, costs=Costs())]
    for way in ways[1:]:
        way.timed = Timed(drafting.executor)
    order = random.Random(1)
    for turn in range(options.rounds + 1):
        for way in order.sample(ways, len(ways)):
            rate, client = answer(drafting if way.drafts else plain, way, name, turn, options)
            if turn:  # the first one warms up
                way.rates.append(rate)
                way.drafted = client.drafted - way.before[0]
                way.accepted = client.accepted - way.before[1]
            elif way.timed:
                way.before = client.drafted, client.accepted
                way.timed.steps.clear()
                way.timed.whole.clear()
    without = statistics.median(ways[0].rates)
    return [told(name, way, without, ways[0].rates, options) for way in ways[1:]]


def told(
    name: str, way: Way, without: float, each: list[float], options: argparse.Namespace
) -> dict[str, Any]:
    """What a way came to."""
    rate = statistics.median(way.rates)
    found = {
        "case": name,
        "draft": options.draft,
        "way": way.name,
        "tokens/s": round(rate, 1),
        "without": round(without, 1),
        "ratio": round(rate / without, 3),
        "pairs": [round(a / b, 3) for a, b in zip(way.rates, each, strict=True)],
        "drafted": way.drafted,
        "accepted": round(way.accepted / way.drafted, 3) if way.drafted else None,
    }
    assert way.timed is not None
    if way.timed.steps:
        small, forward, drawing, step = (
            statistics.median(each) for each in zip(*way.timed.steps, strict=True)
        )
        found |= {
            "steps": len(way.timed.steps),
            "small step": round(small, 3),
            "forward": round(forward, 3),
            "drawing": round(drawing, 3),
            "step": round(step, 3),
        }
        usual = statistics.median(way.timed.whole)
        slow = [(at, round(ms, 1)) for at, ms in enumerate(way.timed.whole) if ms > 2 * usual]
        found |= {"whole": round(usual, 3), "slow": sorted(slow, key=lambda step: -step[1])[:4]}
    return found


def answer(
    made: Assembled, way: Way, name: str, seed: int, options: argparse.Namespace
) -> tuple[float, Client]:
    """Tokens per second of one case; what is known of steps and guesses stays, as in a server."""
    made.executor.release(range(ROWS + 1))
    requests = CASES[name](seed)
    client = Client(requests)
    if way.loop is None:
        # Nothing is cached: another way's tokens lie in the slots by then.
        limits = Limits(made.slots, ROWS, POSITIONS, PREFILL, prefix_caching=False)

        def drafting(kv: Any) -> Drafting:
            return Drafting(ModelDrafts(), options.speculate, kv, way.costs)

        scheduler = Scheduler(limits, drafting=drafting if way.drafts else None)
        executor: Any = way.timed or made.executor
        way.loop = EngineLoop(client, scheduler, executor, overlap=made.overlap)  # type: ignore[arg-type]
    loop = way.loop
    loop.link = client  # type: ignore[assignment]
    while client.started < len(requests):
        loop.turn()
    began, before = time.perf_counter(), client.tokens
    while client.left:
        loop.turn()
    torch.cuda.synchronize()
    rate = (client.tokens - before) / (time.perf_counter() - began)
    while loop._flying is not None:  # another way's steps are the next
        loop.turn()
    return rate, client


if __name__ == "__main__":
    main()
