"""A trained pair: a draft model for the embedded one, and how much of what it drafts is right.

    python benchmarks/draft_pair.py make [--layers 2] [--minutes 8]     build/draft-pair
    python benchmarks/draft_pair.py measure [--json OUT]

`make` cuts the draft model out of the embedded model (embedding, first layers, norm) and teaches it
what that says (distillation: the cross entropy with its distribution) on modules of the standard
library that the embedded model was trained on. No GPU is needed.

`measure` continues held-out modules, greedy and sampled, with and without drafts, and says:

    acceptance      of the drafts at each position behind a known token, always `--speculate`
    tokens a step   what a step of a row brings
    chain and tree  the same for trees of guesses, by a simulation over what was generated. The
                    child number r of a guess is the draft model's r-th best with that position's
                    noise, and a tree has the nodes that were right most often on other texts
    tokens/s        beside those without drafts, pairs by turns; how many are drafted is decided
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from demo_model.corpus import split, standard_library  # noqa: E402
from demo_model.network import BEGIN_ID, Decoder, Shape  # noqa: E402
from demo_model.training import learning_rate, save_weights  # noqa: E402

from tokenpod.core.messages import EngineOptions  # noqa: E402
from tokenpod.core.requests import Request, StoppingParams  # noqa: E402
from tokenpod.core.sampling import SamplingParams  # noqa: E402
from tokenpod.engine.assemble import Assembled, assemble  # noqa: E402
from tokenpod.engine.draft import load_draft  # noqa: E402
from tokenpod.engine.loop import EngineLoop  # noqa: E402
from tokenpod.engine.rng import vocabulary_noise  # noqa: E402
from tokenpod.models.load import load_model  # noqa: E402
from tokenpod.scheduler.drafting import Drafting, ModelDrafts  # noqa: E402
from tokenpod.scheduler.scheduler import Limits, Scheduler  # noqa: E402
from tokenpod.scheduler.step_times import Costs  # noqa: E402
from tokenpod.service.text.tokenizer import Tokenizer  # noqa: E402

DEMO = ROOT / "models" / "demo"
CPU = torch.device("cpu")
WINDOW, ROWS, PEAK = 256, 8, 1e-3
PROMPT, NEW, TEMPERATURE = 200, 96, 0.8
#: Ranks that a simulated tree may have; nodes of trees; how deep they are.
RANKS, NODES, DEPTHS = 6, (8, 16, 32), (4, 6)

Rows = list[list[int]]


# -- make --------------------------------------------------------------------------------------


def make(folder: Path, layers: int, minutes: float, modules: int) -> None:
    """Train the draft model and write its folder."""
    torch.manual_seed(0)
    shape = Shape()
    teacher, student = Decoder(shape, 0.0), Decoder(replace(shape, num_hidden_layers=layers), 0.0)
    weights = load_file(DEMO / "model.safetensors")
    named = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
    teacher.load_state_dict(named)
    kept = {name: t for name, t in named.items() if name in student.state_dict()}
    student.load_state_dict(kept)
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    stream = torch.tensor(learned(modules))
    generator = torch.Generator().manual_seed(1)
    began, step, took = time.monotonic(), 0, 0.0
    while (spent := time.monotonic() - began) < 60 * minutes:
        steps = max(int(60 * minutes / took), 1) if took else 1000
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, PEAK)
        at = torch.randint(len(stream) - WINDOW, (ROWS,), generator=generator)
        ids = stream[at[:, None] + torch.arange(WINDOW)]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = logits_of(teacher, ids).float().softmax(-1)
            said = logits_of(student, ids).float()
        loss = functional.cross_entropy(said.flatten(0, 1), wanted.flatten(0, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        took = (time.monotonic() - began) / step
        if step % 20 == 1:
            same = (said.argmax(-1) == wanted.argmax(-1)).float().mean()
            print(f"step {step}, {spent:.0f} s: {loss:.3f} nats, same best {same:.3f}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(student, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def logits_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """[rows, length, vocabulary] of ids [rows, length]."""
    cos, sin = model.cos[: ids.shape[1]], model.sin[: ids.shape[1]]
    x = model.embed_tokens(ids)
    for layer in model.layers:
        x = layer(x, cos, sin)
    return functional.linear(model.norm(x), model.embed_tokens.weight)


def learned(modules: int) -> list[int]:
    """Tokens of modules that the embedded model was trained on."""
    train, _ = split(standard_library())
    tokenizer = Tokenizer.load(DEMO)
    names = random.Random(0).sample(sorted(train), modules)
    return [
        token
        for name in names
        for token in (BEGIN_ID, *tokenizer.encode(train[name].decode()[:40_000]))
    ]


# -- measure -----------------------------------------------------------------------------------


class Client:
    """The other end of the engine's link: all requests at once."""

    def __init__(self, requests: list[Request]) -> None:
        self._inbox: list[Request] = requests
        self.tokens: dict[int, list[int]] = {r.sequence_ids[0]: [] for r in requests}
        self.left = set(self.tokens)
        self.load: Any = None

    def receive(self, seconds: float | None) -> list[Request]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: Any) -> None:
        assert not message.failures, message.failures
        self.load = message.load
        for sequence, token in zip(message.sequence_ids, message.token_ids, strict=True):
            self.tokens[sequence].append(token)
        for sequence, finish in zip(message.sequence_ids, message.finishes, strict=True):
            if finish:
                self.left.discard(sequence)


class Pair:
    """The embedded model and its draft model, in one engine on a CPU."""

    def __init__(self, folder: Path, speculate: int) -> None:
        self.speculate = speculate
        options = EngineOptions(
            model_folder=str(DEMO),
            dtype="float32",
            device="cpu",
            threads=1,
            max_batch_size=8,
            max_batch_prefill_tokens=512,
            max_batch_total_tokens=8192,
            speculate=speculate,
            draft_folder=str(folder),
        )
        model = load_model(DEMO, dtype=torch.float32, device=CPU, progress=lambda done, total: None)
        draft = load_draft(options, model, 1024, CPU)
        self.made = assemble(model, options, positions=1024, device=CPU, draft=draft)
        plain = replace_options(options)
        self.alone = assemble(model, plain, positions=1024, device=CPU)

    def answer(self, prompts: Rows, sampling: SamplingParams, drafts: str) -> tuple[float, Client]:
        """Tokens per second, and what was said; drafts: "none", "always" or "decided"."""
        requests = [
            Request([at], prompt, sampling, StoppingParams(NEW), drafts=self.speculate)
            for at, prompt in enumerate(prompts)
        ]
        made: Assembled = self.alone if drafts == "none" else self.made
        client = Client(requests)
        costs = Costs() if drafts == "decided" else None
        scheduler = Scheduler(
            Limits(made.slots, 8, 1024, 512),
            drafting=None
            if drafts == "none"
            else lambda kv: Drafting(ModelDrafts(), self.speculate, kv, costs),
        )
        made.executor.release(range(9))
        loop = EngineLoop(client, scheduler, made.executor)  # type: ignore[arg-type]
        began = time.perf_counter()
        while client.left:
            loop.turn()
        seconds = time.perf_counter() - began
        return sum(map(len, client.tokens.values())) / seconds, client


def replace_options(options: EngineOptions) -> EngineOptions:
    """The same without drafts."""
    fields = {name: getattr(options, name) for name in options.__struct_fields__}
    return EngineOptions(**fields | {"speculate": 0, "draft_folder": None})


def measure(folder: Path, speculate: int, texts: int, rounds: int) -> list[dict[str, Any]]:
    """Every figure, greedy and sampled."""
    torch.set_num_threads(1)
    pair = Pair(folder, speculate)
    prompts = held_out(texts)
    kinds = {
        "greedy": SamplingParams(),
        "sampled": SamplingParams(do_sample=True, temperature=TEMPERATURE, seed=1),
    }
    found = []
    for name, sampling in kinds.items():
        drafted = np.zeros(speculate)
        accepted = np.zeros(speculate)
        outputs: Rows = []
        for at in range(0, len(prompts), 8):
            _, client = pair.answer(prompts[at : at + 8], sampling, "always")
            drafted += np.pad(client.load.drafted_at, (0, speculate - len(client.load.drafted_at)))
            accepted += np.pad(
                client.load.accepted_at, (0, speculate - len(client.load.accepted_at))
            )
            outputs += client.tokens.values()
        figures = {
            "kind": name,
            "accepted": round(float(accepted.sum() / drafted.sum()), 3),
            "by position": [round(float(x), 3) for x in accepted / drafted],
            "tokens a step": round(float(1 + accepted.sum() / drafted[0]), 3),
            "trees": trees(ranks_of(folder, prompts, outputs, sampling)),
        }
        rates: dict[str, list[float]] = {"none": [], "decided": []}
        for turn in range(rounds + 1):
            for drafts in ("decided", "none") if turn % 2 else ("none", "decided"):
                rate, _ = pair.answer(prompts[turn : turn + 1], sampling, drafts)
                if turn:
                    rates[drafts].append(rate)
        middle = {drafts: statistics.median(each) for drafts, each in rates.items()}
        figures["tokens/s"] = {drafts: round(rate, 1) for drafts, rate in middle.items()}
        figures["ratio"] = round(middle["decided"] / middle["none"], 3)
        found.append(figures)
        print(json.dumps(figures), flush=True)
    return found


def held_out(texts: int) -> Rows:
    """Beginnings of stretches of held-out modules."""
    _, modules = split(standard_library())
    tokenizer = Tokenizer.load(DEMO)
    parts = []
    for source in modules.values():
        ids = tokenizer.encode(source.decode())
        parts += [ids[at : at + PROMPT] for at in range(0, len(ids) - PROMPT, 4 * PROMPT)]
    return random.Random(2).sample(parts, texts)


# -- trees -------------------------------------------------------------------------------------


@torch.no_grad()
def ranks_of(folder: Path, prompts: Rows, outputs: Rows, sampling: SamplingParams) -> Rows:
    """Of each text's tokens: which of the draft model's guesses they were, from 0."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    student = Decoder(replace(Shape(), num_hidden_layers=layers), 0.0)
    weights = load_file(folder / "model.safetensors")
    student.load_state_dict({n.removeprefix("model."): t.float() for n, t in weights.items()})
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        scores = logits_of(student, torch.tensor([[*prompt, *output[:-1]]]))[0, len(prompt) - 1 :]
        if sampling.do_sample:
            at = torch.arange(len(output))
            noise = vocabulary_noise(
                torch.full_like(at, sampling.seed), torch.zeros_like(at), at, scores.shape[1]
            )
            scores = scores / sampling.temperature - noise.log()
        own = scores.gather(1, torch.tensor(output)[:, None])
        found.append((scores > own).sum(1).tolist())
    return found


def trees(ranks: Rows) -> list[dict[str, Any]]:
    """Tokens a step of chains and of trees, by depth and nodes; trees are chosen on half of it."""
    known, unknown = ranks[::2], ranks[1::2]
    share = Counter(min(rank, RANKS) for text in known for rank in text)
    total = sum(share.values())
    chances = [share[rank] / total for rank in range(RANKS)]
    told = []
    for depth in DEPTHS:
        chain = tokens_per_step(unknown, {(0,) * n for n in range(1, depth + 1)})
        for nodes in NODES:
            tree = tokens_per_step(unknown, best_tree(chances, depth, nodes))
            told.append(
                {
                    "depth": depth,
                    "nodes": nodes,
                    "chain": round(chain, 3),
                    "tree": round(tree, 3),
                    "ratio": round(tree / chain, 3),
                }
            )
    return told


def best_tree(chances: Sequence[float], depth: int, nodes: int) -> set[tuple[int, ...]]:
    """Paths of ranks: the nodes that are right most often, each behind its parent."""
    tree: set[tuple[int, ...]] = set()
    waiting = [(-chance, (rank,)) for rank, chance in enumerate(chances)]
    heapq.heapify(waiting)
    while waiting and len(tree) < nodes:
        chance, path = heapq.heappop(waiting)
        tree.add(path)
        if len(path) < depth:
            for rank, each in enumerate(chances):
                heapq.heappush(waiting, (chance * each, (*path, rank)))
    return tree


def tokens_per_step(ranks: Rows, tree: set[tuple[int, ...]]) -> float:
    """Tokens that a step brings, the one behind the last right guess included."""
    tokens = steps = 0
    for text in ranks:
        at = 1  # the first token comes with the prompt
        while at < len(text):
            path: tuple[int, ...] = ()
            while at + len(path) < len(text) and (*path, text[at + len(path)]) in tree:
                path = (*path, text[at + len(path)])
            at += len(path) + 1
            tokens += len(path) + 1
            steps += 1
    return tokens / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=("make", "measure"))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "draft-pair")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--modules", type=int, default=200)
    parser.add_argument("--speculate", type=int, default=4)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.phase == "make":
        make(options.folder, options.layers, options.minutes, options.modules)
        return
    found = measure(options.folder, options.speculate, options.texts, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
