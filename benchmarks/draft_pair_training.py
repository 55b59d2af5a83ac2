"""Trains what draft_pair.py measures: a target, a small draft model for it and an EAGLE-3 head.

All three learn from Python sources that are on the machine: the standard library, and torch and
transformers where they are installed. Modules whose names have a certain hash are held out, and the
beginnings of stretches of these are what `measure` continues.

    target   predicts the next token
    draft    predicts what the target says (cross entropy with its distribution)
    eagle    the same from the target's streams; as its authors have it, behind its own guesses too:
             a guess `depth` positions on reads the head's own streams since the last known one
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from demo_model.corpus import is_held_out  # noqa: E402
from demo_model.network import BEGIN_ID, Decoder, Shape  # noqa: E402
from demo_model.training import save_weights  # noqa: E402
from draft_pair_head import DEPTH, Head, config_of, streams_of  # noqa: E402

DEMO = ROOT / "models" / "demo"
TARGET = Shape(
    hidden_size=512, intermediate_size=1152, num_attention_heads=8, num_key_value_heads=4
)
DRAFT = Shape(num_hidden_layers=2)
#: Tokens that the head can guess.
GUESSES = 2048
#: Packages beside the standard library; characters in all; tokens of a held-out stretch.
PACKAGES, MOST_CHARACTERS, PROMPT = ("torch", "transformers"), 70_000_000, 200


@dataclass(frozen=True)
class Options:
    """How long and on what."""

    device: torch.device
    #: Seconds of training in all, and windows of tokens in a step.
    seconds: float
    rows: int
    length: int
    characters: int = MOST_CHARACTERS
    target: Shape = TARGET


def make(folder: Path, options: Options) -> None:
    """Write folder/target, folder/draft, folder/eagle and folder/held_out.json."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    learned, held_out = texts(options.characters)
    stream = torch.tensor(encoded(learned), dtype=torch.int32).to(options.device)
    unseen = encoded(held_out)
    spent = time.monotonic() - began
    print(f"{len(stream)} tokens to learn from, {len(unseen)} held out: {spent:.0f} s", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    starts = random.Random(2).sample(range(0, len(unseen) - PROMPT, 4 * PROMPT), 128)
    prompts = [[BEGIN_ID, *unseen[at : at + PROMPT - 1]] for at in starts]
    (folder / "held_out.json").write_text(json.dumps(prompts))
    batches = windows(stream, options)

    target = Decoder(options.target, 0.0).to(options.device)
    train("target", target, lambda: target(next(batches)), 0.55, 2e-3, options)
    target.requires_grad_(False)
    save(folder / "target", target, options.target)

    shape = DRAFT if options.target is TARGET else replace(options.target, num_hidden_layers=1)
    student = Decoder(shape, 0.0).to(options.device)

    def distilled() -> Tensor:
        ids = next(batches)[:, :-1]
        wanted = streams_of(target, ids)[1].softmax(-1)
        said = streams_of(student, ids)[1]
        return functional.cross_entropy(said.flatten(0, 1), wanted.flatten(0, 1))

    train("draft", student, distilled, 0.15, 3e-3, options)
    save(folder / "draft", student, shape)

    share = torch.bincount(stream, minlength=options.target.vocab_size).topk(GUESSES).indices
    head = Head(options.target, share.sort().values).to(options.device)
    train("eagle", head, lambda: head.loss(target, next(batches)[:, :-1]), 0.3, 1e-3, options)
    head.save(folder / "eagle")
    tell(torch.tensor(unseen[: 64 * options.length]), target, student, head, options)


@torch.no_grad()
def tell(ids: Tensor, target: Decoder, student: Decoder, head: Head, options: Options) -> None:
    """Print the target's loss on held-out text, and where the others' best token is its best."""
    ids = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    same, losses = list[Tensor](), list[Tensor]()
    for rows in ids.to(options.device).split(8):
        logits = streams_of(target, rows)[1]
        losses.append(functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()))
        best = logits.argmax(-1)
        said = [streams_of(student, rows)[1], *head.scores(target, rows, DEPTH)]
        same.append(
            torch.stack([(each.argmax(-1) == best)[:, 16:].float().mean() for each in said])
        )
    shares = [round(share, 3) for share in torch.stack(same).mean(0).tolist()]
    print(
        f"held out: {torch.stack(losses).mean().item():.3f} nats; same best token: draft model"
        f" {shares[0]}, head behind 0, 1, .. of its guesses {shares[1:]}",
        flush=True,
    )


def train(
    name: str,
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    share: float,
    peak: float,
    options: Options,
) -> None:
    """Take steps for a share of the time; the rate rises, and falls by a cosine of time."""
    began, limit, step = time.monotonic(), share * options.seconds, 0
    cuda = options.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=cuda
    )
    while (spent := time.monotonic() - began) < limit:
        warm = min((step + 1) / 100, 1.0)
        rate = peak * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * spent / limit)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(options.device.type, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 1:  # waits for the device, so that time is that of steps
            print(f"{name} step {step}, {spent:.0f} s: {loss.item():.3f} nats", flush=True)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{name}: {step} steps, {size} parameters, {loss.item():.3f} nats", flush=True)


# -- text and files ----------------------------------------------------------------------------


def texts(most: int) -> tuple[list[str], list[str]]:
    """Sources to learn from, at most so many characters, in random order; and held-out ones."""
    roots = {"": Path(sysconfig.get_path("stdlib"))}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            roots[name] = Path(spec.origin).parent
    learned, held_out = list[str](), list[str]()
    for package, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            name = ".".join([package, *path.relative_to(root).with_suffix("").parts]).lstrip(".")
            if "site-packages" in name or "dist-packages" in name:
                continue
            text = path.read_bytes().decode("utf-8", "ignore")[:60_000]
            (held_out if is_held_out(name) else learned).append(text)
    random.Random(0).shuffle(learned)
    while sum(map(len, learned)) > most:
        learned = learned[: int(len(learned) * 0.95)]
    known = set(learned)
    return learned, [text for text in held_out if text not in known]


def encoded(sources: list[str]) -> list[int]:
    """Their tokens, one behind the other, each behind BEGIN."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found: list[int] = []
    for at in range(0, len(sources), 256):
        for each in tokenizer.encode_batch(sources[at : at + 256], add_special_tokens=False):
            found += [BEGIN_ID, *each.ids]
    return found


def windows(stream: Tensor, options: Options) -> Iterator[Tensor]:
    """Endless batches [rows, length + 1] int64 of the stream, from anywhere."""
    generator = torch.Generator().manual_seed(1)
    offsets = torch.arange(options.length + 1, device=stream.device)
    while True:
        last = len(stream) - options.length - 1
        at = torch.randint(last, (options.rows,), generator=generator).to(stream.device)
        yield stream[at[:, None] + offsets].long()


def save(folder: Path, model: Decoder, shape: Shape) -> None:
    """A folder that is served as the embedded model's is."""
    save_weights(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, folder)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
