"""Golden checkpoints: tiny, random in every number, and what transformers makes of them."""

from __future__ import annotations

import functools
import json
import re
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from support.checkpoints.golden_kinds import (
    BASES,
    KINDS,
    NESTED_KINDS,
    PADDED_KINDS,
    PREFIX_KINDS,
    SMALL,
    TIER_KINDS,
    Kind,
)
from support.shared import Shared

#: Wide, so that attention and the order of tokens matter to the result.
SPREAD = 0.15
#: The end of a class's name; other names of kinds are those of a family.
_WHOLE_NAME = re.compile(r"(For[A-Z]\w+|LMHeadModel|Model)$")
_KINDS = {**KINDS, **TIER_KINDS, **PADDED_KINDS, **NESTED_KINDS, **PREFIX_KINDS}


class Golden:
    """The checkpoint of a kind, and the model that transformers makes of it.

    Args:
        name: the kind's.
        dtype: of its weights.
        spread: of the numbers of matrices; wider models need a smaller one.
        disguised: False: a kind in disguise stays what transformers knows, with the same numbers.
        more: settings of its config.
    """

    folder: Path

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype = torch.float32,
        spread: float = SPREAD,
        disguised: bool = True,
        **more: Any,
    ) -> None:
        self._kind, self._dtype, self._spread = _KINDS[name], dtype, spread
        self._disguised, self._more = disguised, more
        made_of = repr((dtype, spread, disguised, sorted(more.items())))
        #: How far log probabilities in float32 may be from the model's.
        self.tolerance = self._kind.tolerance
        #: Of a folder: the same for the same arguments.
        self.name = f"{name}-{zlib.crc32(made_of.encode()):08x}"

    @functools.cached_property
    def model(self) -> Any:
        """transformers' model, in evaluation."""
        return self._adapted(self._made())

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""
        model = self._made()
        model.save_pretrained(folder)
        if self._disguised and self._kind.disguise is not None:
            _disguise(self._kind, folder)
        self.model = self._adapted(model)

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocabulary] float32."""
        return self.logprobs_of([tokens])[0]

    def logprobs_of(self, texts: list[list[int]]) -> list[torch.Tensor]:
        """The same of several texts at once: what follows a text does not change it."""
        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        with torch.no_grad():
            logits = self.model(input_ids=padded, use_cache=False).logits
        logprobs = logits.float().log_softmax(-1)
        return [logprobs[i, : len(text)] for i, text in enumerate(texts)]

    def _made(self) -> Any:
        """With the same numbers each time."""
        config = _config(self._kind, self._more)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(7)
            model = getattr(transformers, _class_name(self._kind))(config).eval()
            randomise(model, self._spread)
        return model.to(self._dtype)

    def _adapted(self, model: Any) -> Any:
        if getattr(model.config, "attn_logit_softcapping", None):
            # Chosen by itself in newer versions: sdpa has no soft cap.
            model.config._attn_implementation = "eager"
        if self._kind.patch is not None:
            self._kind.patch(model)
        return model


def make_golden(name: str, folder: Path, **how: Any) -> Golden:
    """The checkpoint of a kind, saved into `folder`, which is for it alone."""
    golden = Golden(name, **how)
    golden.save(folder)
    golden.folder = folder
    return golden


class SharedGoldens:
    """Such checkpoints in folders that all processes of the run share; nobody changes them."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known: dict[str, Golden] = {}

    def __call__(self, name: str, **how: Any) -> Golden:
        """The one of a kind; other arguments make another."""
        golden = Golden(name, **how)
        if golden.name not in self._known:
            golden.folder = self._shared.folder(golden.name, golden.save)
            self._known[golden.name] = golden
        return self._known[golden.name]


def golden_config(name: str) -> dict[str, Any]:
    """What the config.json of a kind's checkpoint has, without making the checkpoint."""
    return dict(json.loads(_golden_config(name)))


@functools.cache
def _golden_config(name: str) -> str:
    kind = _KINDS[name]
    config = json.loads(_config(kind, {}).to_json_string())
    config["architectures"] = [_class_name(kind)]
    if kind.disguise is not None:
        kind.disguise(config, {})
    return json.dumps(config)


def _class_name(kind: Kind) -> str:
    return kind.model if _WHOLE_NAME.search(kind.model) else f"{kind.model}ForCausalLM"


def _config(kind: Kind, more: dict[str, Any]) -> Any:
    # By its name: to ask the model's class would import all of the model's module.
    stem = _WHOLE_NAME.sub("", kind.model)
    names = [f"{stem}Config"] if stem != kind.model else [f"{stem}TextConfig", f"{stem}Config"]
    config_class = next(
        getattr(transformers, name) for name in names if hasattr(transformers, name)
    )
    base = {} if kind.whole else BASES.get(kind.model, SMALL)
    return config_class(**{**base, **kind.settings, **more})


def randomise(model: nn.Module, matrices: float = SPREAD) -> None:
    """All parameters and saved buffers: zeros and ones would hide what is left out."""
    parameters, saved = dict(model.named_parameters()), model.state_dict().keys()
    for name, tensor in {**dict(model.named_buffers()), **parameters}.items():
        if name not in saved or not tensor.is_floating_point():
            continue
        scales = tensor.ndim == 1 and name.endswith("weight")
        spread = matrices if tensor.ndim > 1 else 0.2
        nn.init.normal_(tensor, mean=float(scales), std=spread)


def _disguise(kind: Kind, folder: Path) -> None:
    assert kind.disguise is not None
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    kind.disguise(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
