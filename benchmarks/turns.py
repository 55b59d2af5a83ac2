"""The whole engine in process on a CPU: processor seconds of a workload's cases.

    python benchmarks/turns.py --workload cpu-workload.json [--cases a b c] [--sampled]

A Llama shape with random weights, prompts of random ids, greedy unless sampled, end of sequence
ignored. It counts the processor time of the process, all of its threads: what the engine costs,
whatever else the machine does. To compare two versions, run this script with each in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from step import CPU, SHAPES, config_of, random_weights

from tokenpod.core.messages import EngineOptions
from tokenpod.core.outputs import StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.adapters import Adapters
from tokenpod.engine.assemble import assemble
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.loop import EngineLoop
from tokenpod.kernels.registry import operations_for
from tokenpod.models.decoder import Decoder
from tokenpod.scheduler.scheduler import Limits, Scheduler


class Client:
    """The service's end of the link, within the process."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.left = 0

    def receive(self, seconds: float | None) -> list[Request]:
        """All at once."""
        del seconds
        requests, self.requests = self.requests, []
        return requests

    def send(self, message: object) -> None:
        """Count what has ended."""
        assert isinstance(message, StepOutputs)
        assert not message.failures, message.failures[0]
        self.left -= sum(finish != 0 for finish in message.finishes)


def engine(shape: str, threads: int) -> tuple[EngineLoop, Client]:
    """A loop with an executor of random weights."""
    torch.set_num_threads(threads)
    config = config_of(shape)
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cpu",
        threads=threads,
        max_batch_size=64,
        max_batch_prefill_tokens=512,
        max_total_tokens=1024,
        max_batch_total_tokens=32_768,
    )
    model = Decoder(config, random_weights(config), operations_for(CPU, torch.float32))
    made = assemble(model, options, positions=1024, device=CPU)
    limits = Limits(made.slots, max_rows=64, max_positions=1024, prefill_tokens=512)
    client, scheduler = Client(), Scheduler(limits)
    adapters = Adapters(
        None, scheduler.adapters, [], root="", most=0, send=client.send, followers=None
    )
    masks = Masks(Guidance, config.vocab_size, options.constraints)
    loop = EngineLoop(
        client,  # type: ignore[arg-type]
        scheduler,
        made.executor,
        overlap=made.overlap,
        adapters=adapters,
        masked=MaskedSteps(masks, overlap=made.overlap),
    )
    return loop, client


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=["a", "b", "c"])
    parser.add_argument("--shape", choices=SHAPES, default="15m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sampled", action="store_true", help="temperature, top_p and a penalty")
    options = parser.parse_args()
    cases = json.loads(options.workload.read_text())
    draw, number = random.Random(time.time_ns()), 0
    with torch.inference_mode():
        loop, client = engine(options.shape, options.threads)
        for name in options.cases:
            lengths = [(each["prompt"], each["output"]) for each in cases[name]["requests"]]
            for prompt, output in lengths:
                sampling = SamplingParams()
                if options.sampled:
                    sampling = SamplingParams(
                        do_sample=True,
                        temperature=0.8,
                        top_p=0.9,
                        presence_penalty=0.5,
                        seed=number,
                    )
                tokens = [draw.randrange(SHAPES[options.shape][-1]) for _ in range(prompt)]
                stopping = StoppingParams(max_new_tokens=output)
                client.requests.append(Request([number], tokens, sampling, stopping))
                number += 1
            client.left = len(lengths)
            began, turns = time.process_time(), 0
            while client.left:
                loop.turn()
                turns += 1
            spent = time.process_time() - began
            print(
                f"{name} {turns} turns {spent:.3f} s {spent / turns * 1e3:.3f} ms a turn",
                flush=True,
            )


if __name__ == "__main__":
    main()
