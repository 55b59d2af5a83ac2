"""The engine in process: an executor of random weights, its loop, and the other end of its link."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.support.timing import synchronise
from tokenpod.core.constraints import ConstraintLimits
from tokenpod.core.messages import EngineOptions
from tokenpod.core.outputs import Load, StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.adapters.adapters import Adapters
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import Assembled, assemble
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.scheduler.scheduler import Limits, Scheduler

GREEDY = SamplingParams()


class Compilations:
    """Counts kernels that Triton compiles."""

    def __init__(self) -> None:
        import triton

        self.names: list[str] = []
        triton.knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *args: Any, **kwargs: Any) -> None:
        self.names.append(str(kwargs.get("repr", "?"))[:80])


@dataclass
class Client:
    """The service's end of the link: hands requests in, times what comes out.

    `by_sequence` keeps each sequence's times, too, which costs the loop's thread a little.
    """

    by_sequence: bool = False
    inbox: list[Any] = field(default_factory=list)
    #: (when, tokens) of each message that brought any.
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    #: Sequences that have ended, and how many are under way.
    ended: set[int] = field(default_factory=set)
    left: int = 0
    refused: list[str] = field(default_factory=list)
    load: Load | None = None

    def receive(self, seconds: float | None) -> list[Any]:
        """All that was asked for since the last time."""
        if seconds and not self.inbox:
            time.sleep(min(seconds, 0.001))
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: object) -> None:
        """Note when tokens come, and which sequences end."""
        if not isinstance(message, StepOutputs):
            return
        self.load = message.load
        for failure in message.failures:
            self.refused.append(failure.message)
            self.ended.add(failure.sequence_id)
            self.left -= 1
        if not message.sequence_ids:
            return
        now = time.perf_counter()
        self.arrivals.append((now, len(message.sequence_ids)))
        if self.by_sequence:
            for sequence in message.sequence_ids:
                self.times[sequence].append(now)
        if any(message.finishes):
            for sequence, finish in zip(message.sequence_ids, message.finishes, strict=True):
                if finish:
                    self.ended.add(sequence)
                    self.left -= 1

    def gaps(self) -> list[float]:
        """Seconds between messages with tokens."""
        return [b[0] - a[0] for a, b in itertools.pairwise(self.arrivals)]


class Engine:
    """An executor for at most `rows` rows of `positions`, with `prefill` prompt tokens in a step.

    `more` are further fields of EngineOptions, `extra` further arguments of `assemble`.
    """

    def __init__(
        self,
        model: Decoder,
        device: torch.device,
        *,
        rows: int,
        positions: int,
        prefill: int,
        extra: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.options = EngineOptions(
            model_folder="",
            dtype=None,
            device=device.type,
            threads=more.pop("threads", torch.get_num_threads() if device.type == "cpu" else 0),
            max_batch_size=rows,
            max_batch_prefill_tokens=prefill,
            **more,
        )
        began = time.perf_counter()
        with torch.inference_mode():
            self.made: Assembled = assemble(
                model, self.options, positions=positions, device=device, **(extra or {})
            )
        #: Seconds until the engine was warm.
        self.warm_s = time.perf_counter() - began
        self.rows, self.positions, self.prefill = rows, positions, prefill
        self.vocabulary = model.config.vocab_size
        #: Whether prefixes are shared.
        self.shares = model.config.own_state is None

    def loop(
        self,
        client: Client,
        *,
        limits: dict[str, Any] | None = None,
        masks: Masks | None = None,
        full: bool = True,
        **policies: Any,
    ) -> EngineLoop:
        """A loop with a scheduler of its own; nothing of a loop before it runs any more.

        `limits` and `policies` are further arguments of Limits and Scheduler; `full` adds what
        `serve` has for adapters and masks, the latter by `masks` if those are given.
        """
        self.made.executor.release(range(self.rows + 1))
        room = self.made.room
        more = {"slots": room.slots, "windows": room.windows, "sharing": self.shares}
        more |= limits or {}
        scheduler = Scheduler(
            Limits(
                max_rows=min(self.rows, self.made.room.rows),
                max_positions=self.positions,
                prefill_tokens=self.prefill,
                **more,
            ),
            **policies,
        )
        parts: dict[str, Any] = {}
        if full:
            parts["adapters"] = Adapters(
                None, scheduler.adapters, [], root="", most=0, send=client.send, followers=None
            )
            masks = masks or Masks(Guidance, self.vocabulary, ConstraintLimits())
            parts["masked"] = MaskedSteps(masks, overlap=self.made.overlap)
        return EngineLoop(
            client,  # type: ignore[arg-type]
            scheduler,
            self.made.executor,
            overlap=self.made.overlap,
            **parts,
        )


@dataclass
class Bench:
    """A loop and its client: asks, and turns until something is so."""

    loop: EngineLoop
    client: Client
    vocabulary: int
    next_id: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(3))

    def ask(
        self, prompt: int | list[int], output: int, sampling: SamplingParams = GREEDY, **more: Any
    ) -> int:
        """Queue a request with a prompt of random ids, or this one; its sequence."""
        if isinstance(prompt, int):
            known = min(128_000, self.vocabulary)
            prompt = [self.draw.randrange(10, known) for _ in range(prompt)]
        number, self.next_id = self.next_id, self.next_id + 1
        stopping = StoppingParams(max_new_tokens=output)
        self.client.inbox.append(Request([number], prompt, sampling, stopping, **more))
        self.client.left += 1
        return number

    def turn_until(self, reached: Callable[[], bool]) -> int:
        """Turn until it is so; how many turns that took."""
        turns = 0
        with torch.inference_mode():
            while not reached():
                self.loop.turn()
                turns += 1
        return turns

    def run(self, lengths: list[tuple[int, int]], sampling: SamplingParams = GREEDY) -> Run:
        """All of these requests at once, to their ends."""
        for prompt, output in lengths:
            self.ask(prompt, output, sampling)
        self.client.arrivals.clear()
        began, used = time.perf_counter(), time.process_time()
        turns = self.turn_until(lambda: not self.client.left)
        synchronise()
        assert not self.client.refused, self.client.refused[0]
        return Run(time.perf_counter() - began, time.process_time() - used, turns)

    def end(self, sequences: list[int]) -> None:
        """Abort what is left of these."""
        left = [each for each in sequences if each not in self.client.ended]
        self.loop.scheduler.abort(left)
        if self.loop.masked is not None:
            self.loop.masked.forget(left)
        self.client.ended.update(left)
        self.client.left -= len(left)


@dataclass(frozen=True)
class Run:
    """Seconds, processor seconds of the process, and turns of the loop."""

    seconds: float
    processor: float
    turns: int


def demo_model() -> Decoder:
    """The embedded model in float32, on the CPU."""
    from tokenpod.models.load import load_model
    from tokenpod.service.pod.model_store import resolve_model

    return load_model(  # type: ignore[return-value]
        resolve_model("demo", None),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
    )
