"""What n-gram drafts bring on a CPU, with the embedded model on code that it has never seen.

    python benchmarks/drafts.py [--rounds 5] [--speculate 4] [--json OUT]

Each case is answered with and without drafts by turns, in one process, on one loaded model: the
whole engine but for its sockets. `edit` prompts with the first part of a held-out module, a comment
and the beginning of the same part again, which the model goes on to copy, as an editor of code
does; `continue` with held-out code alone. Greedy, end of text ignored. The ratio is of the medians
of tokens per second; acceptance is accepted over drafted tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.assemble import assemble
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.run import drafting
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.service.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

POSITIONS = 2048
#: Tokens of what is copied, of its beginning that is repeated, and of the answer.
SOURCE, BEGUN, NEW = 500, 40, 200
#: Requests at once, by case.
CASES = {"edit": (1, 8), "continue": (1, 8, 32)}


class Client:
    """The other end of the engine's link: all requests at once."""

    def __init__(self, requests: list[Request]) -> None:
        self._inbox: list[Request] = requests
        self.left = {request.sequence_ids[0] for request in requests}
        self.tokens = 0
        self.drafted = self.accepted = 0

    def receive(self, seconds: float | None) -> list[Request]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: Any) -> None:
        self.tokens += len(message.token_ids)
        self.drafted, self.accepted = message.load.drafted_tokens, message.load.accepted_tokens
        for sequence, finish in zip(message.sequence_ids, message.finishes, strict=True):
            if finish:
                self.left.discard(sequence)


class Engine:
    """The embedded model on a CPU."""

    def __init__(self, speculate: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.folder = ROOT / "models" / "demo"
        self.options = EngineOptions(
            model_folder=str(self.folder),
            dtype="float32",
            device="cpu",
            threads=threads,
            max_batch_size=64,
            max_batch_prefill_tokens=512,
            max_batch_total_tokens=64 * POSITIONS,
            speculate=speculate,
        )
        model = load_model(
            self.folder,
            dtype=torch.float32,
            device=torch.device("cpu"),
            progress=lambda done, total: None,
        )
        self.made = assemble(model, self.options, positions=POSITIONS, device=torch.device("cpu"))

    def answer(self, prompts: list[list[int]], speculate: int) -> tuple[float, Client]:
        """Seconds from the first token of all to the end."""
        self.made.executor.release(range(65))
        requests = [
            Request(
                [at],
                prompt,
                SamplingParams(),
                StoppingParams(NEW),
                drafts=speculate,
            )
            for at, prompt in enumerate(prompts)
        ]
        client = Client(requests)
        options = msgspec.structs.replace(self.options, speculate=speculate)
        limits = Limits(self.made.slots, 64, POSITIONS, 512)
        scheduler = Scheduler(limits, drafting=drafting(options))
        loop = EngineLoop(client, scheduler, self.made.executor)  # type: ignore[arg-type]
        while client.tokens < len(prompts) or scheduler._queue:
            loop.turn()
        began, before = time.perf_counter(), client.tokens
        while client.left:
            loop.turn()
        seconds = time.perf_counter() - began
        return (client.tokens - before) / seconds, client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculate", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = Engine(options.speculate, options.threads)
    texts = held_out(engine.folder)
    results = []
    for case, sizes in CASES.items():
        for size in sizes:
            results.append(measure(engine, case, size, texts, options))
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(
    engine: Engine, case: str, size: int, texts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """One case, with and without drafts by turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    drafted = accepted = 0
    for turn in range(options.rounds + 1):
        first = turn * size
        some = [texts[(first + i) % len(texts)] for i in range(size)]
        prompts = [prompt_of(case, text) for text in some]
        order = (True, False) if turn % 2 else (False, True)
        for drafts in order:
            rate, client = engine.answer(prompts, options.speculate if drafts else 0)
            if turn:  # the first one warms up
                rates[drafts].append(rate)
                drafted, accepted = drafted + client.drafted, accepted + client.accepted
    with_drafts, without = (statistics.median(rates[drafts]) for drafts in (True, False))
    return {
        "case": case,
        "requests": size,
        "tokens/s": round(with_drafts, 1),
        "without": round(without, 1),
        "ratio": round(with_drafts / without, 3),
        "pairs": [round(a / b, 3) for a, b in zip(rates[True], rates[False], strict=True)],
        "drafted": drafted,
        "accepted": round(accepted / drafted, 3) if drafted else None,
    }


def prompt_of(case: str, text: list[int]) -> list[int]:
    """The tokens before the answer."""
    source = text[:SOURCE]
    return [*source, *text[:BEGUN]] if case == "edit" else source


def held_out(folder: Path) -> list[list[int]]:
    """Tokens of held-out modules, each cut into parts."""
    from support.corpus import split, standard_library

    _, modules = split(standard_library())
    tokenizer = Tokenizer.load(folder)
    parts = []
    for source in modules.values():
        ids = tokenizer.encode(source.decode())
        parts += [ids[at : at + SOURCE] for at in range(0, len(ids) - SOURCE, SOURCE)]
    return parts[:: max(len(parts) // 512, 1)]


if __name__ == "__main__":
    main()
