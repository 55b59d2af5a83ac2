"""Golden checkpoints: tiny, random in every number, and what transformers makes of them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
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
    SMALL,
    TIER_KINDS,
    Kind,
)

#: Wide, so that attention and the order of tokens matter to the result.
SPREAD = 0.15
_KINDS = {**KINDS, **TIER_KINDS, **PADDED_KINDS, **NESTED_KINDS}


@dataclass
class Golden:
    """A checkpoint and the model that transformers makes of it."""

    folder: Path
    model: Any

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


def make_golden(
    name: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    spread: float = SPREAD,
    disguised: bool = True,
    **more: Any,
) -> Golden:
    """Save the checkpoint of a kind, with `more` settings, into `folder`.

    Args:
        name: the kind's.
        folder: for it alone.
        dtype: of its weights.
        spread: of the numbers of matrices; wider models need a smaller one.
        disguised: False: a kind in disguise stays what transformers knows, with the same numbers.
        more: settings.
    """
    kind = _KINDS[name]
    config = _config(kind, more)
    model_class = getattr(transformers, _class_name(kind))
    torch.manual_seed(7)
    model = model_class(config).eval()
    randomise(model, spread)
    model.to(dtype).save_pretrained(folder)
    if getattr(config, "attn_logit_softcapping", None):
        # Chosen by itself in newer versions: sdpa has no soft cap.
        model.config._attn_implementation = "eager"
    if disguised and kind.disguise is not None:
        _disguise(kind, folder)
    if kind.patch is not None:
        kind.patch(model)
    return Golden(folder, model)


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
    return kind.model if hasattr(transformers, kind.model) else f"{kind.model}ForCausalLM"


def _config(kind: Kind, more: dict[str, Any]) -> Any:
    config_class = getattr(transformers, _class_name(kind)).config_class
    base = {} if kind.whole else BASES.get(kind.model, SMALL)
    return config_class(**{**base, **kind.settings, **more})


def randomise(model: nn.Module, matrices: float = SPREAD) -> None:
    """All parameters and saved buffers: zeros and ones would hide what is left out."""
    parameters = dict(model.named_parameters())
    for name, tensor in {**dict(model.named_buffers()), **parameters}.items():
        if name not in model.state_dict() or not tensor.is_floating_point():
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
