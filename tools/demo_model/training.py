"""The training loop: one process, one GPU, the whole corpus on the device."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .network import BEGIN_ID, Decoder, Shape


@dataclass(frozen=True)
class Options:
    """How to train. The defaults are those of the shipped weights."""

    steps: int = 7000
    minutes: float | None = None  # cuts the steps to what fits into this time
    rows: int = 32  # windows in a step
    length: int = Shape.max_position_embeddings  # tokens in a window
    learning_rate: float = 2.5e-3  # at its peak
    weight_decay: float = 0.4  # of matrices
    dropout: float = 0.2
    seed: int = 0
    evaluate_every: int = 500  # steps
    compile: bool = True


class Windows:
    """Endless batches of windows [rows, length + 1] over the token stream.

    Three rows of four tile the stream, shifted anew and shuffled each epoch. The fourth begins
    with BEGIN at a definition or an import, because that is how prompts look.
    """

    def __init__(
        self, stream: Tensor, starts: Tensor, rows: int, length: int, generator: torch.Generator
    ) -> None:
        self.stream, self.length = stream, length
        self.starts = starts[starts < len(stream) - length]
        self.opening = rows // 4
        self.tiled = rows - self.opening
        self.generator = generator
        self.offsets = torch.arange(length + 1, device=stream.device)
        self.queue = torch.empty(0, dtype=torch.int64)

    def batch(self) -> Tensor:
        while len(self.queue) < self.tiled:
            shift = int(torch.randint(self.length, (1,), generator=self.generator))
            count = (len(self.stream) - 1 - shift) // self.length
            tiles = torch.randperm(count, generator=self.generator) * self.length + shift
            self.queue = torch.cat((self.queue, tiles))
        tiles, self.queue = self.queue[: self.tiled], self.queue[self.tiled :]
        picks = torch.randint(len(self.starts), (self.opening,), generator=self.generator)
        begins = torch.cat((tiles, self.starts[picks] - 1)).to(self.stream.device)
        window = self.stream[begins[:, None] + self.offsets].long()
        window[self.tiled :, 0] = BEGIN_ID
        return window


class Training:
    """The model, its optimizer and its data on one device: a GPU where there is one."""

    def __init__(self, work: Path, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        stream, unseen = (
            torch.from_numpy(np.load(work / f"{name}.npy").astype(np.int32)).to(self.device)
            for name in ("train", "held_out")
        )
        starts = torch.from_numpy(np.load(work / "starts.npy"))
        generator = torch.Generator().manual_seed(options.seed)
        self.windows = Windows(stream, starts, options.rows, options.length, generator)
        self.unseen = unseen
        self.model = Decoder(Shape(), options.dropout).to(self.device)
        self.forward = torch.compile(self.model) if options.compile else self.model
        self.parameters = list(self.model.parameters())
        matrices = [p for p in self.parameters if p.dim() == 2]
        gains = [p for p in self.parameters if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": options.weight_decay},
                {"params": gains, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(self, rate: float) -> Tensor:
        """Learn from one batch; its loss, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.forward(self.windows.batch())
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats per token over whole windows of the held-out stream, each alone."""
        length, rows = self.options.length, self.options.rows
        last = len(self.unseen) - length
        tiles = torch.stack([self.unseen[i : i + length + 1] for i in range(0, last, length)])
        self.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = [
                float(self.forward(tiles[i : i + rows].long()))
                for i in range(0, len(tiles) - rows + 1, rows)
            ]
        self.model.train()
        return sum(losses) / len(losses)


def train(work: Path, model_dir: Path, options: Options) -> None:
    """Write model.safetensors, of the step that predicts held-out modules best, into `model_dir`.

    The course of the training goes into `work`/training.json. With `minutes` the number of steps
    is cut to what fits, by the speed of steps 50 to 150.
    """
    began = time.monotonic()
    training = Training(work, options)
    steps, best, course = options.steps, math.inf, []
    step, mark = 0, began
    while step < steps:
        loss = training.step(learning_rate(step, steps, options.learning_rate))
        step += 1
        if step == 50:
            loss.item()  # waits for the device
            mark = time.monotonic()
        if step == 150 and options.minutes:
            loss.item()
            now = time.monotonic()
            left = options.minutes * 60 - (now - began)
            steps = min(steps, 150 + max(0, int(left * 0.97 * 100 / (now - mark))))
            print(f"{100 / (now - mark):.2f} steps/s: {steps} steps", flush=True)
        if step % options.evaluate_every == 0 or step == steps:
            unseen_loss = training.held_out_loss()
            course.append({"step": step, "train": loss.item(), "held_out": unseen_loss})
            print(course[-1], f"{time.monotonic() - began:.0f} s", flush=True)
            if unseen_loss < best:
                best = unseen_loss
                save_weights(training.model, model_dir)
    facts = {
        "parameters": sum(p.numel() for p in training.parameters),
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "options": asdict(options),
        "course": course,
    }
    (work / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 300 steps (or a tenth), then a cosine down to a fiftieth of the peak."""
    warmup = min(300, max(1, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def save_weights(model: Decoder, model_dir: Path) -> None:
    tensors = {
        f"model.{name}": weight.detach().to(torch.bfloat16).cpu().contiguous()
        for name, weight in model.state_dict().items()
    }
    model_dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
