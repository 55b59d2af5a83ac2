"""A trained target, a draft model and an EAGLE-3 head for it: how many of their drafts are right.

    python -P benchmarks/draft_pair.py make [--device cuda] [--seconds 100]     build/draft-pair
    python -P benchmarks/draft_pair.py measure [--sources ngram draft eagle] [--json OUT]

`make` trains all three ([draft_pair_training.py]); 100 seconds are meant for a large GPU, less than
60 MB of weights come of it. `measure` continues held-out Python sources on a CPU, greedy and
sampled, by the engine, with each source of drafts, and says:

    acceptance      of the drafts at each position behind a known token, always `--speculate`
    tokens a step   what a step of a row brings
    chain and tree  the same for trees of guesses, by a simulation over what was generated. The
                    child number r of a guess is the source's r-th best with that position's noise,
                    and a tree has the nodes that were right most often on other texts
    built           with `--trees`: tokens a step of one row with trees of so many drafts, by the
                    engine, and how many texts come out as with chains; float32 rounds otherwise
    tokens/s        beside those without drafts, pairs by turns; how many are drafted is decided
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

import draft_pair_training as training  # noqa: E402
from demo_model.network import Decoder, Shape  # noqa: E402
from draft_pair_head import Head, streams_of  # noqa: E402

from tokenpod.core.messages import EngineOptions  # noqa: E402
from tokenpod.core.requests import Request, StoppingParams  # noqa: E402
from tokenpod.core.sampling import SamplingParams  # noqa: E402
from tokenpod.engine.assemble import assemble  # noqa: E402
from tokenpod.engine.draft import load_draft  # noqa: E402
from tokenpod.engine.loop import EngineLoop  # noqa: E402
from tokenpod.engine.rng import vocabulary_noise  # noqa: E402
from tokenpod.models.load import load_model  # noqa: E402
from tokenpod.scheduler.drafting import Drafting, DraftSource, ModelDrafts  # noqa: E402
from tokenpod.scheduler.ngrams import NGrams  # noqa: E402
from tokenpod.scheduler.scheduler import Limits, Scheduler  # noqa: E402
from tokenpod.scheduler.step_times import Costs  # noqa: E402

CPU = torch.device("cpu")
NEW, TEMPERATURE = 96, 0.8
SOURCES = ("ngram", "draft", "eagle")
#: Ranks that a simulated tree may have; nodes of trees; how deep they are.
RANKS, NODES, DEPTHS = 6, (8, 16, 32), (4, 6)

Rows = list[list[int]]
#: Of a text, by how many guesses are before it in a step: the rank of each of its tokens.
Ranks = list[list[int]]


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
    """The target and a source of drafts, in one engine on a CPU."""

    def __init__(self, folder: Path, source: str, speculate: int) -> None:
        self.speculate, self._ngrams = speculate, source == "ngram"
        target = folder / "target"
        options = EngineOptions(
            model_folder=str(target),
            dtype="float32",
            device="cpu",
            threads=1,
            max_batch_size=8,
            max_batch_prefill_tokens=512,
            max_batch_total_tokens=8192,
            speculate=speculate,
            draft_folder=None if self._ngrams else str(folder / source),
        )
        model = load_model(
            target, dtype=torch.float32, device=CPU, progress=lambda done, total: None
        )
        draft = load_draft(options, model, 1024, CPU)
        self.made = assemble(model, options, positions=1024, device=CPU, draft=draft)
        fields = {name: getattr(options, name) for name in options.__struct_fields__}
        plain = EngineOptions(**fields | {"speculate": 0, "draft_folder": None})
        self.alone = assemble(model, plain, positions=1024, device=CPU)

    def answer(
        self, prompts: Rows, sampling: SamplingParams, drafts: str, tree: int = 0
    ) -> tuple[float, Client]:
        """Tokens per second, and what was said; drafts: "none", "always" or "decided"."""
        requests = [
            Request([at], prompt, sampling, StoppingParams(NEW), drafts=self.speculate)
            for at, prompt in enumerate(prompts)
        ]
        made = self.alone if drafts == "none" else self.made
        client = Client(requests)
        costs = Costs() if drafts == "decided" else None

        def drafting(kv: Any) -> Drafting:
            source: DraftSource = NGrams() if self._ngrams else ModelDrafts()
            return Drafting(source, self.speculate, kv, costs, tree=tree)

        scheduler = Scheduler(
            Limits(made.slots, 8, 1024, 512), drafting=None if drafts == "none" else drafting
        )
        made.executor.release(range(9))
        loop = EngineLoop(client, scheduler, made.executor)  # type: ignore[arg-type]
        began = time.perf_counter()
        while client.left:
            loop.turn()
        seconds = time.perf_counter() - began
        return sum(map(len, client.tokens.values())) / seconds, client


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every figure of every source, greedy and sampled."""
    torch.set_num_threads(1)
    prompts = json.loads((options.folder / "held_out.json").read_text())[: options.texts]
    kinds = {
        "greedy": SamplingParams(),
        "sampled": SamplingParams(do_sample=True, temperature=TEMPERATURE, seed=1),
    }
    found = []
    for source in options.sources:
        pair = Pair(options.folder, source, options.speculate)
        for kind, sampling in kinds.items():
            figures, outputs = acceptance(pair, prompts, sampling)
            if source != "ngram":
                ranks = ranks_of(options.folder, source, prompts, outputs, sampling)
                figures["trees"] = trees(ranks)
                figures["chances"] = [
                    [round(chance, 3) for chance in chances_at(ranks, depth)]
                    for depth in range(options.speculate)
                ]
                figures["built"] = [
                    built(pair, prompts, sampling, tree, outputs) for tree in options.trees
                ]
            if options.rounds:
                figures |= speeds(pair, prompts, sampling, options.rounds)
            found.append({"source": source, "kind": kind} | figures)
            print(json.dumps(found[-1]), flush=True)
    return found


def acceptance(pair: Pair, prompts: Rows, sampling: SamplingParams) -> tuple[dict[str, Any], Rows]:
    """Of drafts by position, always as many; and what was said."""
    drafted, accepted = np.zeros(pair.speculate), np.zeros(pair.speculate)
    outputs: Rows = []
    for at in range(0, len(prompts), 8):
        _, client = pair.answer(prompts[at : at + 8], sampling, "always")
        for into, counts in (
            (drafted, client.load.drafted_at),
            (accepted, client.load.accepted_at),
        ):
            into[: len(counts)] += counts
        outputs += client.tokens.values()
    tokens = sum(map(len, outputs)) - len(outputs)  # the first ones come with prompts
    figures = {
        "accepted": round(float(accepted.sum() / max(drafted.sum(), 1)), 3),
        "by position": [round(float(x), 3) for x in accepted / np.maximum(drafted, 1)],
        "tokens a step": round(float(tokens / (tokens - accepted.sum())), 3),
    }
    return figures, outputs


def built(
    pair: Pair, prompts: Rows, sampling: SamplingParams, tree: int, outputs: Rows
) -> dict[str, Any]:
    """Always trees of so many drafts, one text at a time; `outputs`: what chains came to."""
    accepted = alike = 0
    for prompt, known in zip(prompts, outputs, strict=True):
        _, client = pair.answer([prompt], sampling, "always", tree)
        accepted += sum(client.load.accepted_at)
        alike += client.tokens[0] == known
    tokens = (NEW - 1) * len(prompts)
    each = round(tokens / (tokens - accepted), 3)
    return {"drafts": tree, "tokens a step": each, "alike": f"{alike} of {len(prompts)}"}


def speeds(pair: Pair, prompts: Rows, sampling: SamplingParams, rounds: int) -> dict[str, Any]:
    """One text at a time, with drafts and without by turns."""
    rates: dict[str, list[float]] = {"none": [], "decided": []}
    for turn in range(rounds + 1):
        for drafts in ("decided", "none") if turn % 2 else ("none", "decided"):
            rate, _ = pair.answer(prompts[turn : turn + 1], sampling, drafts)
            if turn:  # the first one warms up
                rates[drafts].append(rate)
    middle = {drafts: statistics.median(each) for drafts, each in rates.items()}
    return {
        "tokens/s": {drafts: round(rate, 1) for drafts, rate in middle.items()},
        "ratio": round(middle["decided"] / middle["none"], 3),
    }


# -- trees -------------------------------------------------------------------------------------


def decoder_in(folder: Path) -> Decoder:
    """A model that `make` has written."""
    fields = json.loads((folder / "config.json").read_text())
    shape = Shape(**{name: fields[name] for name in Shape.__dataclass_fields__})
    decoder, weights = Decoder(shape, 0.0), load_file(folder / "model.safetensors")
    decoder.load_state_dict({n.removeprefix("model."): t.float() for n, t in weights.items()})
    return decoder


@torch.no_grad()
def ranks_of(
    folder: Path, source: str, prompts: Rows, outputs: Rows, sampling: SamplingParams
) -> list[Ranks]:
    """Of each text's tokens: which of the source's guesses they were, from 0."""
    target = decoder_in(folder / "target")
    student = decoder_in(folder / "draft") if source == "draft" else None
    head = Head.load(folder / "eagle", target.shape) if source == "eagle" else None
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output[:-1]]])
        own, first = torch.tensor(output)[:, None], len(prompt) - 1
        noise = 0.0
        if sampling.do_sample:
            at = torch.arange(len(output))
            draws = torch.full_like(at, sampling.seed), torch.zeros_like(at), at
            noise = vocabulary_noise(*draws, target.shape.vocab_size).log() * sampling.temperature
        if student is not None:
            each = [streams_of(student, ids)[1]] * max(DEPTHS)
        else:
            assert head is not None
            each = head.scores(target, ids, max(DEPTHS))
        found.append([ranked(said[0, first:] - noise, own) for said in each])
    return found


def ranked(scores: Tensor, own: Tensor) -> list[int]:
    """[n] how many scores of [n, vocabulary] are above that of the token [n, 1]."""
    mine = scores.gather(1, own)
    above = torch.where(mine.isfinite(), scores > mine, True)  # what can't be guessed is last
    return above.sum(1).tolist()


def trees(ranks: list[Ranks]) -> list[dict[str, Any]]:
    """Tokens a step of chains and of trees, by depth and nodes; trees are chosen on half of it."""
    known, unknown = ranks[::2], ranks[1::2]
    chances = [chances_at(known, depth) for depth in range(max(DEPTHS))]
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


def chances_at(ranks: list[Ranks], depth: int) -> list[float]:
    """How often each rank is right behind so many guesses."""
    share = Counter(min(rank, RANKS) for text in ranks for rank in text[depth])
    return [share[rank] / sum(share.values()) for rank in range(RANKS)]


def best_tree(chances: Sequence[Sequence[float]], depth: int, nodes: int) -> set[tuple[int, ...]]:
    """Paths of ranks: the nodes that are right most often, each behind its parent."""
    tree: set[tuple[int, ...]] = set()
    waiting = [(-chance, (rank,)) for rank, chance in enumerate(chances[0])]
    heapq.heapify(waiting)
    while waiting and len(tree) < nodes:
        chance, path = heapq.heappop(waiting)
        tree.add(path)
        if len(path) < depth:
            for rank, each in enumerate(chances[len(path)]):
                heapq.heappush(waiting, (chance * each, (*path, rank)))
    return tree


def tokens_per_step(ranks: list[Ranks], tree: set[tuple[int, ...]]) -> float:
    """Tokens that a step brings, the one behind the last right guess included."""
    tokens = steps = 0
    for text in ranks:
        at, end = 1, len(text[0])  # the first token comes with the prompt
        while at < end:
            path: tuple[int, ...] = ()
            while at + (n := len(path)) < end and n < len(text):
                if (*path, text[n][at + n]) not in tree:
                    break
                path = (*path, text[n][at + n])
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=100, help="of training")
    parser.add_argument("--rows", type=int, default=64, help="of a training step")
    parser.add_argument("--length", type=int, default=512, help="tokens of each of them")
    parser.add_argument("--characters", type=int, default=training.MOST_CHARACTERS)
    parser.add_argument("--sources", nargs="*", choices=SOURCES, default=[*SOURCES])
    parser.add_argument("--speculate", type=int, default=6)
    parser.add_argument("--trees", nargs="*", type=int, default=[])
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.phase == "make":
        asked = training.Options(
            torch.device(options.device),
            options.seconds,
            options.rows,
            options.length,
            options.characters,
        )
        training.make(options.folder, asked)
        return
    found = measure(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
