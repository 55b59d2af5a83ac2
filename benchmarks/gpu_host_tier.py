"""What the host's memory is worth to keys and values on one GPU: the engine in process.

    python -P benchmarks/gpu_host_tier.py [--json OUT]     # at most 120 s
    python -P benchmarks/gpu_host_tier.py --tiny           # a tiny shape on a CPU: does it run?

An 8B Llama shape with random bf16 weights.

    swap     a sequence of 256 to 32,768 tokens is preempted: time until its next token if it was
             swapped (out, and in again) and if it is computed again, alone and beside 32 rows that
             decode. `least` is the shortest length from which on swapping is faster.
    prefix   time to the first token of a prompt of 1k, 8k, 32k tokens whose prefix lies in the
             pool, in the host's memory, or nowhere
    beside   turns of the loop with 64 rows that decode at 1,024 tokens: undisturbed, while 512
             tokens go out with every step, and while 32k tokens come in

Times are milliseconds on the host's clock, of whole turns: planning and launching are in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
from tokenpod.scheduler.preemption import PREEMPTIONS
from tokenpod.scheduler.scheduler import Limits, Scheduler

LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]
PREFIXES = [1024, 8192, 32_768]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}


class Client:
    """The other end of the engine's link: counts tokens."""

    def __init__(self) -> None:
        self.inbox: list[Request] = []
        self.tokens: Counter[int] = Counter()
        self.over: set[int] = set()

    def receive(self, seconds: float | None) -> list[Request]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: Any) -> None:
        assert not message.failures, message.failures
        self.tokens.update(message.sequence_ids)
        ended = zip(message.sequence_ids, message.finishes, strict=True)
        self.over.update(sequence for sequence, finish in ended if finish)


class Bench:
    """An executor, and a scheduler and a loop that are made anew for each case."""

    def __init__(self, made: Assembled, options: EngineOptions, positions: int) -> None:
        self._made, self._options, self._positions = made, options, positions
        self._ids = 0
        #: New tokens of rows that decode all the while.
        self.long = min(4096, positions // 8)
        self.begin("swap")

    def begin(self, preemption: str) -> None:
        """Nothing runs, nothing is cached."""
        rows = self._options.max_batch_size
        self._made.executor.release(range(rows + 1))
        limits = Limits(
            self._made.slots,
            rows,
            self._positions,
            self._options.max_batch_prefill_tokens,
            host_slots=self._made.host_slots,
        )
        self.client = Client()
        self.scheduler = Scheduler(limits, preemption=PREEMPTIONS[preemption](1))
        self.loop = EngineLoop(
            self.client,  # type: ignore[arg-type]
            self.scheduler,
            self._made.executor,
            overlap=self._made.overlap,
        )

    def ask(self, prompt: list[int], new: int) -> int:
        """A request's id."""
        self._ids += 1
        request = Request([self._ids], prompt, SamplingParams(), StoppingParams(new))
        self.client.inbox.append(request)
        return self._ids

    def until(self, reached: Callable[[], bool]) -> float:
        """Turn until something is so; milliseconds."""
        began = time.perf_counter()
        while not reached():
            self.loop.turn()
        return 1e3 * (time.perf_counter() - began)

    def turns(self, count: int, before: Callable[[], None] = lambda: None) -> list[float]:
        """Milliseconds of each of so many turns."""
        times = []
        for _ in range(count):
            before()
            began = time.perf_counter()
            self.loop.turn()
            times.append(1e3 * (time.perf_counter() - began))
        return times

    def rows(self, count: int, context: int, new: int) -> None:
        """Let rows decode, each behind a prompt of its own."""
        ids = [self.ask(prompt_of(context, 500 + i), new) for i in range(count)]
        self.until(lambda: all(self.client.tokens[i] > 2 for i in ids))

    def end(self) -> None:
        """Let nothing run any more."""
        self.scheduler.abort([*self.scheduler._sequences])
        self.until(lambda: not self.scheduler.busy and self.loop._flying is None)


def prompt_of(tokens: int, which: int, vocabulary: int = 1000) -> list[int]:
    """Prompts that begin unlike each other."""
    return [(which * 7919 + at * at + at * which) % vocabulary for at in range(tokens)]


def swapping(bench: Bench, lengths: list[int], busy: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Time until the next token of a preempted sequence, by its length."""
    for rows in (0, busy):
        for length in lengths:
            found = {}
            for kind in ("swap", "recompute"):
                bench.begin(kind)
                if rows:
                    bench.rows(rows, 256, bench.long)
                turns = range(1 + _rounds(rounds, length))
                times = [_preempted(bench, prompt_of(length, turn)) for turn in turns]
                bench.end()
                found[kind] = round(statistics.median(times[1:]), 2)  # the first one warms up
            yield {"case": "swap", "tokens": length, "rows": rows, **found}


def _rounds(rounds: int, length: int) -> int:
    """The long ones cost seconds, and differ little."""
    return rounds if length < 8192 else 1


def _preempted(bench: Bench, prompt: list[int]) -> float:
    sequence, tokens = bench.ask(prompt, 100), bench.client.tokens
    bench.until(lambda: tokens[sequence] > 3)
    scheduler = bench.scheduler
    assert scheduler._batcher.preempt(scheduler._sequences[sequence])
    # The step in flight settles, and the sequence gives its slots up.
    bench.until(lambda: bench.scheduler.load().waiting + bench.scheduler.load().swapped > 0)
    bench.scheduler.kv.flush()
    had = tokens[sequence]
    took = bench.until(lambda: tokens[sequence] > had)
    bench.scheduler.abort([sequence])
    bench.turns(3)
    return took


def prefixes(bench: Bench, lengths: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Time to first token by where the prefix lies."""
    for length in lengths:
        found: dict[str, float] = {}
        for where in ("pool", "host", "nowhere"):
            bench.begin("recompute")
            times = []
            for turn in range(1 + _rounds(rounds, length)):
                prompt = prompt_of(length, turn)
                first = bench.ask(prompt, 2)
                bench.until(lambda first=first: first in bench.client.over)  # type: ignore[misc]
                kv = bench.scheduler.kv
                if where == "host":
                    kv.evict(kv.tree.tokens)
                elif where == "nowhere":
                    kv.flush()
                # The next step takes along what goes out.
                other = bench.ask(prompt_of(8, 777 + turn), 2)
                bench.until(lambda other=other: other in bench.client.over)  # type: ignore[misc]
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                second = bench.ask([*prompt, 5], 2)
                times.append(bench.until(lambda second=second: bench.client.tokens[second] > 0))  # type: ignore[misc]
                bench.until(lambda second=second: second in bench.client.over)  # type: ignore[misc]
            found[where] = round(statistics.median(times[1:]), 2)
            bench.end()
        yield {"case": "prefix", "tokens": length, **found}


def beside(bench: Bench, rows: int, context: int, length: int) -> Iterator[dict[str, Any]]:
    """Turns of rows that decode, while copies run and while none do."""
    bench.begin("recompute")
    # What goes out later, and what comes in at the end.
    for which in range(3):
        first = bench.ask(prompt_of(length, which), 1)
        bench.until(lambda first=first: first in bench.client.over)  # type: ignore[misc]
    bench.rows(rows, context, bench.long)
    kv, count = bench.scheduler.kv, max(min(3 * length // 512, 160), 8)
    bench.turns(20)
    yield {"case": "beside", "copies": "none", **_spread(bench.turns(count))}
    out = bench.turns(count - 4, lambda: kv.evict(512))
    yield {"case": "beside", "copies": "512 tokens out with every step", **_spread(out)}
    kv.evict(kv.tree.tokens)
    bench.turns(20)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before = bench.scheduler.load().fetched_tokens
    late = bench.ask([*prompt_of(length, 2), 5], 2)
    times: list[float] = []
    while not bench.client.tokens[late]:
        times += bench.turns(1)
    fetched = bench.scheduler.load().fetched_tokens - before
    yield {"case": "beside", "copies": f"{fetched} tokens in", **_spread(times)}
    bench.end()


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "turns": len(times),
        "median": round(statistics.median(times), 2),
        "p90": round(ordered[int(0.9 * (len(times) - 1))], 2),
        "most": round(ordered[-1], 2),
    }


def least(results: list[dict[str, Any]], rows: int) -> int | None:
    """The shortest length from which on swapping is faster, beside so many rows; None: never."""
    of_rows = [each for each in results if each["case"] == "swap" and each["rows"] == rows]
    slower = [each["tokens"] for each in of_rows if each["swap"] >= each["recompute"]]
    faster = [each["tokens"] for each in of_rows if each["tokens"] > max(slower, default=0)]
    return min(faster, default=None)


def made_for(options: argparse.Namespace) -> Bench:
    """The engine of a server with `--host-kv-bytes`."""
    device = torch.device("cpu" if options.tiny else "cuda")
    shapes = json.loads((Path(__file__).parent / "shapes.json").read_text())
    shape = TINY if options.tiny else shapes["llama-3.1-8b"]
    if not options.tiny:
        let_segments_grow()
    config = config_of(shape)
    model = random_model(family_of(shape), config, device)
    positions = 2048 if options.tiny else 40_000
    asked = EngineOptions(
        model_folder="",
        dtype="bfloat16",
        device=device.type,
        threads=1,
        max_batch_size=72,
        max_batch_prefill_tokens=64 if options.tiny else 4096,
        max_batch_total_tokens=20_000 if options.tiny else 450_000,
        host_kv_bytes=(32 << 20) if options.tiny else (20 << 30),
    )
    return Bench(assemble(model, asked, positions=positions, device=device), asked, positions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    bench = made_for(options)
    print(f"started in {time.perf_counter() - began:.1f} s", flush=True)
    lengths, held = (LENGTHS, PREFIXES) if not options.tiny else ([128, 512], [512])
    shape = (8, 64, 1024) if options.tiny else (64, 1024, 32_768)
    busy = 4 if options.tiny else 32
    results: list[dict[str, Any]] = []
    for case in (
        swapping(bench, lengths, busy, options.rounds),
        prefixes(bench, held, options.rounds),
        beside(bench, *shape),
    ):
        for result in case:
            results.append(result)
            print(json.dumps(result), flush=True)
    for rows in (0, busy):
        results.append({"case": "least", "rows": rows, "tokens": least(results, rows)})
        print(json.dumps(results[-1]), flush=True)
    print(f"{time.perf_counter() - began:.1f} s in all")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
