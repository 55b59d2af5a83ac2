"""What drafts bring on one GPU, at an acceptance that is set: the engine in process.

    python -P benchmarks/gpu_drafts.py [--speculate 8] [--rounds 3] [--json OUT]

An 8B Llama shape with random bf16 weights but for the head, whose row j is the embedding's row
j - 1: after token t it says t + 1, whatever the layers add and however sums are rounded. So a test
source can be right as often as it likes, and a text can be known to be copied from its prompt.

    simulated   batch 1, 4 and 16; a source that is right for 75 % of the tokens (aim: >= 2.0 at 1)
    sampled     batch 1, the same with tokens that are drawn, and with penalties
    ngram       batch 1; the output is copied from the prompt, drafts are n-grams (aim: >= 2.5)
    chat        1,000 at once, nothing repeats itself, n-grams (aim: >= 0.98)

Each case runs with and without drafts by turns on one engine; a ratio is of the medians of tokens
per second from the first token on, of `chat` from the beginning.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import config_of, family_of, random_model

from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.assemble import Assembled, assemble
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.memory import let_segments_grow
from tokenpod.scheduler.drafting import Drafting, DraftSource
from tokenpod.scheduler.ngrams import NGrams
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.step_times import Costs

POSITIONS, ROWS, PREFILL = 8192, 512, 4096
PENALISED = SamplingParams(do_sample=True, temperature=0.8, repetition_penalty=1.1, seed=1)
SAMPLED = SamplingParams(do_sample=True, temperature=0.8, seed=1)


class Counting:
    """A source that is right for a given share of the tokens."""

    watched = True

    def __init__(self, right: float) -> None:
        self._right = right
        self._chance = random.Random(1)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        last = sequence.outputs[-1]
        return [
            last + i if self._chance.random() < self._right else last for i in range(1, most + 1)
        ]

    def forget(self, sequence: Sequence) -> None:
        pass


class Client:
    """The other end of the engine's link."""

    def __init__(self, requests: list[Request]) -> None:
        self._inbox = requests
        self.left = {request.sequence_ids[0] for request in requests}
        self.last = {request.sequence_ids[0]: request.prompt[-1] for request in requests}
        self.started = self.tokens = 0
        self.drafted = self.accepted = 0

    def receive(self, seconds: float | None) -> list[Request]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: Any) -> None:
        assert not message.failures, message.failures
        self.tokens += len(message.token_ids)
        self.started += len(message.started)
        self.drafted, self.accepted = message.load.drafted_tokens, message.load.accepted_tokens
        for sequence, token in zip(message.sequence_ids, message.token_ids, strict=True):
            assert token == self.last[sequence] + 1, "it counts"
            self.last[sequence] = token
        for sequence, finish in zip(message.sequence_ids, message.finishes, strict=True):
            if finish:
                self.left.discard(sequence)


@dataclass(frozen=True)
class Case:
    """What is asked at once, and who guesses."""

    name: str
    requests: Callable[[int], list[Request]]
    source: Callable[[], DraftSource]
    #: Time counts from the first token of all.
    from_first: bool = True


def counted(first: int, prompt: int, new: int, sampling: SamplingParams, i: int) -> Request:
    """A prompt of falling numbers, so that nothing of the answer is in it."""
    tokens = [first + 20_000 - at for at in range(prompt - 1)]
    return Request([i], [*tokens, first], sampling, StoppingParams(new), drafts=64)


def copying(seed: int) -> list[Request]:
    """2,000 tokens, of which the first 400 follow again."""
    first = 30_000 + 3_000 * seed
    prompt = [*range(first, first + 2000), *range(first, first + 20)]
    return [Request([0], prompt, SamplingParams(), StoppingParams(400), drafts=64)]


def chatting(seed: int) -> list[Request]:
    draw = random.Random(seed)
    return [
        counted(
            draw.randrange(1000, 90_000),
            draw.randrange(20, 600),
            draw.randrange(60, 400),
            SamplingParams() if i % 2 else SAMPLED,
            i,
        )
        for i in range(1000)
    ]


def batch(rows: int, sampling: SamplingParams) -> Callable[[int], list[Request]]:
    def asked(seed: int) -> list[Request]:
        return [counted(1000 * (1 + i) + 20_000 * seed, 256, 400, sampling, i) for i in range(rows)]

    return asked


CASES = [
    *(
        Case(f"simulated {rows}", batch(rows, SamplingParams()), lambda: Counting(0.75))
        for rows in (1, 4, 16)
    ),
    Case("sampled 1", batch(1, SAMPLED), lambda: Counting(0.75)),
    Case("penalised 1", batch(1, PENALISED), lambda: Counting(0.75)),
    Case("ngram 1", copying, NGrams),
    Case("chat", chatting, NGrams, from_first=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = engine(options.speculate)
    results = []
    for case in CASES:
        if case.name in options.cases:
            results.append(measure(made, case, options))
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def engine(speculate: int) -> Assembled:
    """The engine of a server with `--speculate`."""
    let_segments_grow()
    device = torch.device("cuda")
    shapes = json.loads((Path(__file__).parent / "shapes.json").read_text())
    shape = shapes["llama-3.1-8b"]
    config = config_of(shape)

    def count(weights: dict[str, torch.Tensor]) -> None:
        weights["head"] = weights["embedding"].roll(1, 0) / 64

    model = random_model(family_of(shape), config, device, change=count)
    options = EngineOptions(
        model_folder="",
        dtype="bfloat16",
        device="cuda",
        threads=1,
        max_batch_size=ROWS,
        max_batch_prefill_tokens=PREFILL,
        speculate=speculate,
    )
    return assemble(model, options, positions=POSITIONS, device=device)


def measure(made: Assembled, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One case, with and without drafts by turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    drafted = accepted = 0
    for turn in range(options.rounds + 1):
        for drafts in (True, False) if turn % 2 else (False, True):
            speculate = options.speculate if drafts else 0
            rate, client = answer(made, case, turn, speculate)
            if turn:  # the first one warms up
                rates[drafts].append(rate)
                drafted, accepted = drafted + client.drafted, accepted + client.accepted
    with_drafts, without = (statistics.median(rates[drafts]) for drafts in (True, False))
    return {
        "case": case.name,
        "tokens/s": round(with_drafts, 1),
        "without": round(without, 1),
        "ratio": round(with_drafts / without, 3),
        "pairs": [round(a / b, 3) for a, b in zip(rates[True], rates[False], strict=True)],
        "drafted": drafted,
        "accepted": round(accepted / drafted, 3) if drafted else None,
    }


def answer(made: Assembled, case: Case, seed: int, speculate: int) -> tuple[float, Client]:
    """Tokens per second of one case."""
    made.executor.release(range(ROWS + 1))
    requests = case.requests(seed)
    client = Client(requests)
    limits = Limits(made.slots, ROWS, POSITIONS, PREFILL)

    def drafting(kv: Any) -> Drafting:
        return Drafting(case.source(), speculate, kv, Costs())

    scheduler = Scheduler(limits, drafting=drafting if speculate else None)
    loop = EngineLoop(client, scheduler, made.executor, overlap=made.overlap)  # type: ignore[arg-type]
    asked = len(requests)
    while case.from_first and client.started < asked:
        loop.turn()
    began, before = time.perf_counter(), client.tokens
    while client.left:
        loop.turn()
    torch.cuda.synchronize()
    return (client.tokens - before) / (time.perf_counter() - began), client


if __name__ == "__main__":
    main()
