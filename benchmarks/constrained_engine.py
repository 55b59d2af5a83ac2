"""The engine whose constrained rows are measured, its loop, and what is asked of it."""

from __future__ import annotations

import argparse
import base64
import gc
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import torch
from constrained_rows import Client, Library
from constraints import vocabulary

from tokenpod.core.constraints import Constraint, ConstraintLimits, JsonSchema
from tokenpod.core.messages import EngineOptions, Vocabulary
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.assemble import Assembled, assemble
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.memory import let_segments_grow
from tokenpod.models.facts import LoadedModel
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.step_times import Costs
from tokenpod.service.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}


class Bench:
    """An engine, its loop and its client.

    Args:
        made: for `positions` of a sequence and `prefill` tokens of prompts in a step.
        vocab: width of the logits.
        known: the tokens' bytes, and which are special.
        asked: options.
    """

    def __init__(
        self,
        made: Assembled,
        vocab: int,
        known: tuple[list[bytes], list[int]],
        asked: argparse.Namespace,
    ) -> None:
        self.asked = asked
        self.client = Client()
        positions, prefill = sizes(asked)
        limits = ConstraintLimits(workers=asked.workers, compile_seconds=2.0)
        masks = Masks(Library, vocab, limits, trials=True)
        self.loop = EngineLoop(
            self.client,
            Scheduler(
                Limits(made.slots, made.room.rows, positions, prefill, forced=asked.speculate),
                forced_costs=Costs(),
            ),
            made.executor,
            overlap=made.overlap,
            masked=MaskedSteps(masks, overlap=made.overlap),
        )
        self.client.inbox.append(Vocabulary(*known))
        self.next = 1

    def ask(self, constraint: Constraint | None, new: int, prompt: int = 32) -> int:
        """Queue a request; its sequence."""
        number, self.next = self.next, self.next + 1
        self.client.inbox.append(
            Request(
                [number],
                [5 + number % 200] * prompt,
                SamplingParams(do_sample=True, temperature=1.0, seed=number),
                StoppingParams(max_new_tokens=new),
                constraint=constraint,
            )
        )
        self.client.left.add(number)
        return number

    def run(self, wanted: set[int]) -> None:
        """Turn until these have ended."""
        with torch.inference_mode():
            while wanted & self.client.left:
                self.loop.turn()

    def end(self, sequences: list[int]) -> None:
        """Abort what is left of these."""
        assert self.loop.masked is not None
        self.loop.scheduler.abort(sequences)
        self.loop.masked.forget(sequences)
        self.client.left -= set(sequences)

    def gaps(self, sequences: list[int]) -> list[float]:
        """Milliseconds between tokens of these sequences."""
        times = [self.client.times[sequence] for sequence in sequences]
        return [(b - a) * 1e3 for each in times for a, b in pairwise(each)]


def schema(number: int) -> JsonSchema:
    """One of its own, whose texts are long."""
    properties = {
        "name": {"type": "string", "maxLength": 30},
        f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 10**6 + number},
        "tags": {"type": "array", "items": {"enum": ["red", "green", f"blue {number}"]}},
        "nested": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    }
    item = {"type": "object", "properties": properties, "required": list(properties)}
    return JsonSchema(json.dumps({"type": "array", "items": item, "minItems": 500}))


def sizes(asked: argparse.Namespace) -> tuple[int, int]:
    """Positions of a sequence, and prompt tokens of a step."""
    return (2048, 64) if asked.cpu else (8192, 4096)


def demo(asked: argparse.Namespace) -> Bench:
    """The embedded model on a CPU."""
    from tokenizers import Tokenizer as Backend

    # A core is left to the workers.
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) - 1, 1))
    folder = ROOT / "models" / "demo"
    model = load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
    )
    known = Tokenizer(Backend.from_file(str(folder / "tokenizer.json"))).token_bytes()
    assert known is not None
    return Bench(assembled(model, asked, torch.device("cpu")), 4096, known, asked)


def shape_8b(asked: argparse.Namespace) -> Bench:
    """An 8B shape of random weights on a GPU."""
    from gpu import config_of, family_of, random_model

    let_segments_grow()
    began = time.perf_counter()
    known = words(asked)
    device = torch.device("cuda")
    model = random_model(family_of(LLAMA_8B), config_of(LLAMA_8B), device)
    made = assembled(model, asked, device)
    gc.collect()
    gc.freeze()  # as the engine does
    print(f"ready after {time.perf_counter() - began:.0f} s; {made.slots:,} slots", flush=True)
    return Bench(made, LLAMA_8B["vocab_size"], known, asked)


def words(asked: argparse.Namespace) -> tuple[list[bytes], list[int]]:
    """Bytes of the tokens of a large vocabulary, and which are special; see `--vocabulary`."""
    if asked.vocabulary is not None:
        found = json.loads(asked.vocabulary.read_text())
        if "vocab" in found:
            most = LLAMA_8B["vocab_size"] - 1
            known = [base64.b64decode(token["token_bytes"]) for token in found["vocab"][:most]]
            return [*known, b"<|end_of_text|>"], [most]
        return [token.encode("latin-1") for token in found["tokens"]], found["special"]
    known = Tokenizer(vocabulary(LLAMA_8B["vocab_size"])).token_bytes()
    assert known is not None
    if asked.save_vocabulary is not None:
        # A character for each byte.
        tokens = [token.decode("latin-1") for token in known[0]]
        asked.save_vocabulary.write_text(json.dumps({"tokens": tokens, "special": known[1]}))
    return known


def assembled(model: LoadedModel, asked: argparse.Namespace, device: torch.device) -> Assembled:
    """The engine of a server."""
    positions, prefill = sizes(asked)
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device=device.type,
        threads=0,
        max_batch_size=max(asked.rows + 8, asked.streams + 32),
        max_batch_prefill_tokens=prefill,
        speculate=asked.speculate,
    )
    with torch.inference_mode():
        return assemble(model, options, positions=positions, device=device)
