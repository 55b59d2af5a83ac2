"""Try every class of transformers' causal mapping; what came of it goes to commands/models.json.

Each is tried in a fork of this process, which has imported all that they share, with limits on
memory and time: a tiny random checkpoint is saved and loaded as a server would load it, self-check
included. There are as many at a time as processors. With names as arguments these alone are tried,
and what came of others stays as it was.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from survey.tiny import WITH_ENCODER, class_named, tiny_config
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.nested import NESTED, TEXT_MODELS
from tokenpod.models.families import FAMILIES
from tokenpod.models.load import load_model
from tokenpod.models.tier.padded import Together

DATA = Path(__file__).resolve().parents[2] / "commands" / "models.json"
#: Of a process that tries one class.
SECONDS, BYTES = 60, 12 << 30
#: Parameters that count as tiny.
MOST = 30_000_000


def main() -> int:
    """Exit status 1 if more than a tenth could not be tried."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    native = {name for family in FAMILIES for name in family.architectures}
    tried = {*native, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *WITH_ENCODER}
    names = sorted(tried - {*NESTED})
    wanted = sys.argv[1:] or names
    # What children would each import again.
    _outcome("ApertusForCausalLM")
    found = {name: {"served": "native"} for name in wanted if name in native}
    for name, outcome, seconds in _tried([name for name in wanted if name not in native]):
        found[name] = outcome
        print(f"{name:44}{seconds:5.1f} s  {outcome}", flush=True)
    classes = json.loads(DATA.read_text())["classes"] if sys.argv[1:] else {}
    classes |= {name: {**found[name], **_described(name)} for name in wanted}
    classes |= {name: _nested(name, classes) for name in NESTED}
    told = {"transformers": transformers.__version__, "classes": dict(sorted(classes.items()))}
    DATA.write_text(json.dumps(told, indent=1) + "\n")
    untried = sum(entry["served"] == "untried" for entry in classes.values())
    return int(untried > len(classes) / 10)


@dataclass
class _Trial:
    """A class that is being tried in a fork of this process."""

    name: str
    process: int
    began: float
    said: bytes = b""

    def outcome(self) -> dict[str, Any]:
        """What came of it, once it has said all."""
        os.waitpid(self.process, 0)
        if not self.said:
            limits = f"{SECONDS} s and {BYTES >> 30} GiB"
            return {"served": "untried", "reason": f"not done within {limits}"}
        found: dict[str, Any] = json.loads(self.said)
        return found


def _tried(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Each class, what came of it and the seconds that it took, as they are done."""
    waiting, running = deque(names), dict[int, _Trial]()
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            answers, trial = _begin(waiting.popleft(), [*running])
            running[answers] = trial
        for answers in select.select([*running], [], [])[0]:
            part = os.read(answers, 1 << 16)
            running[answers].said += part
            if not part:
                os.close(answers)
                trial = running.pop(answers)
                yield trial.name, trial.outcome(), time.monotonic() - trial.began


def _begin(name: str, others: Sequence[int]) -> tuple[int, _Trial]:
    """Where the answers of a new fork come, beside those of others."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for end in (read, *others):
            os.close(end)
        _limit()
        os.write(write, json.dumps(_outcome(name)).encode())
        os._exit(0)
    os.close(write)
    return read, _Trial(name, child, time.monotonic())


def _limit() -> None:
    """Of memory and time; output of libraries goes nowhere."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _outcome(name: str) -> dict[str, Any]:
    found = class_named(name)
    try:
        config = tiny_config(found)
    except Exception as error:  # whatever a config's own checks raise
        return _untried(error)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            problem = _save(found, config, folder)
            if problem is not None:
                return problem
            config.architectures = [name]
            config.save_pretrained(folder)
            return _served(folder, config)
    except ModelError as error:
        reason = re.search(r"is not supported: (.*); `tokenpod models`", str(error))
        return {"served": "no", "reason": reason[1] if reason else str(error)}


def _save(found: type[Any], config: Any, folder: Path) -> dict[str, Any] | None:
    """A random checkpoint; otherwise why there is none."""
    torch.manual_seed(1)
    try:
        with torch.device("meta"):
            numbers = sum(weight.numel() for weight in found(config).parameters())
        if numbers > MOST:
            return {"served": "untried", "reason": f"its tiny model has {numbers:,} parameters"}
        model = found(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.15)
        model.save_pretrained(folder)
    except Exception as error:  # whatever a class does with such a config
        return _untried(error)
    return None


def _served(folder: Path, config: Any) -> dict[str, Any]:
    """By whom, and what the check has seen of a model."""
    model: Any = load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=256,
    )
    if model.config.own_state is not None:
        return {"served": "padded", "features": [*_done(model)]}
    features = sorted(_seen(model, config.get_text_config(decoder=True)))
    return {"served": "transformers", "features": features}


def _done(model: Any) -> Iterator[str]:
    """What a class with a cache of its own does rightly."""
    if not model.config.own_state.scores_prompts:
        yield "encoder"
    elif not model.can.continues:
        yield "pieces of prompts anew"
    yield {
        Together.ANY: "all rows in a batch",
        Together.PADDED: "padded batches",
        Together.ALIKE: "batches of one length",
        Together.ALONE: "rows alone",
    }[model.can.together]


def _seen(model: Any, text: Any) -> Iterator[str]:
    dispatches = model._dispatches
    if any(dispatch.reach.window for dispatch in dispatches):
        yield "windows"
    if any(dispatch.reach.chunk for dispatch in dispatches):
        yield "chunks"
    if any(not dispatch.stores for dispatch in dispatches):
        yield "shared keys and values"
    if any(dispatch.heads != dispatch.kv_heads for dispatch in dispatches):
        yield "grouped heads"
    if any(dispatch.value_dim != dispatch.key_dim for dispatch in dispatches):
        yield "values of another size"
    if len(set(model.config.kv_layouts)) > 1:
        yield "heads by layer"
    if getattr(text, "num_experts_per_tok", None):
        yield "experts"


def _untried(error: Exception) -> dict[str, Any]:
    line = " ".join(str(error).split())[:120]
    return {"served": "untried", "reason": f"no tiny model ({type(error).__name__}: {line})"}


def _nested(name: str, classes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of a checkpoint that also sees or hears: who computes its text."""
    kinds = NESTED[name].texts or tuple(TEXT_MODELS)
    texts = sorted({TEXT_MODELS[kind] for kind in kinds})
    ways = [classes[text]["served"] for text in texts]
    # Of several, the usual one: for a few there is no family.
    served = max(ways, key=ways.count)
    return {"served": served, "texts": texts, **_described(name)}


def _described(name: str) -> dict[str, Any]:
    """What transformers says of a class."""
    kind = getattr(getattr(transformers, name, None), "config_class", None)
    return {"type": getattr(kind, "model_type", ""), "example": _example(name)}


def _example(name: str) -> str:
    """The checkpoint that transformers' documentation of a class's config names."""
    found = getattr(transformers, name, None)
    if found is None or found.config_class is None:
        return ""
    source = Path(sys.modules[found.config_class.__module__].__file__ or "").read_text()
    match = re.search(rf'checkpoint="([^"]+)"[^@]*?class {found.config_class.__name__}\b', source)
    return match[1] if match else ""


if __name__ == "__main__":
    sys.exit(main())
