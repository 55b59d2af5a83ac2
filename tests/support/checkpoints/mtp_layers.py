"""Checkpoints with a layer that predicts further tokens, and what transformers' layer makes of it.

transformers leaves such layers out; but they are built as the model's last one, so the definition
here is that class's layer between the published parts around it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.golden import SPREAD, make_golden


@dataclass(frozen=True)
class Published:
    """How a family's checkpoints have the layer behind `last` others."""

    #: Before its own tensors, and before those that all layers have.
    at: str
    layer: str
    embedding_norm: str
    feature_norm: str
    join: str
    norm: str
    #: What config.json says then.
    config: dict[str, Any]
    #: Copies of the model's tensors that are there too.
    copies: tuple[tuple[str, str], ...] = ()
    feature_first: bool = False
    #: What norms add to their weights.
    offset: int = 0


DEEPSEEK = Published(
    "model.layers.{last}.",
    "",
    *("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    {"num_nextn_predict_layers": 1},
    (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ),
)
_QWEN = ("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
QWEN3_5 = Published(*_QWEN, {"mtp_num_hidden_layers": 1}, offset=1)
#: Its configs do not say that there is a layer.
QWEN3_NEXT = Published(*_QWEN, {}, offset=1)
MIMO = Published(
    "model.mtp_layers.0.",
    "",
    *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    {"num_nextn_predict_layers": 1},
    feature_first=True,
)

#: Layers that have states, and others; the last one predicts further tokens.
STATES = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_STATES = {"layer_types": STATES, "num_hidden_layers": len(STATES)}
#: Golden kinds, and what is changed of them.
PREDICTING: dict[str, tuple[Published, dict[str, Any]]] = {
    "glm4-moe": (DEEPSEEK, {}),
    "glm4-moe-lite": (DEEPSEEK, {}),
    "deepseek-v3": (DEEPSEEK, {}),
    "kimi-k2-stacked": (DEEPSEEK, {}),
    "qwen3-5": (QWEN3_5, _STATES),
    "qwen3-5-moe-varied": (QWEN3_5, _STATES),
    "qwen3-next": (QWEN3_NEXT, _STATES),
    "mimo": (MIMO, {}),
}


@dataclass
class Predicting:
    """A checkpoint, transformers' model with one layer more, and the other tensors of that."""

    folder: Path
    model: Any
    how: Published
    own: dict[str, torch.Tensor]

    @torch.no_grad()
    def guesses(
        self, tokens: list[int], then: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n - 1, vocabulary] behind each entry of a text, and those behind a guess more."""
        features = self.features(tokens)
        streams = self._streams(tokens[1:], features[:-1])
        said = self._said(streams)
        guess = int(said[-1].argmax()) if then is None else then
        # The last entry's stream stands in for the feature of its position.
        more = torch.cat([features[:-1], streams[-1:]])
        return said, self._said(self._streams([*tokens[1:], guess], more))[-1]

    @torch.no_grad()
    def says(self, prompt: list[int], tokens: int) -> list[int]:
        """The likeliest tokens behind a prompt, by the model without that layer."""
        text = list(prompt)
        for _ in range(tokens):
            text.append(int(self.model.lm_head(self.features(text)[-1]).argmax()))
        return text[len(prompt) :]

    def features(self, tokens: list[int]) -> torch.Tensor:
        """[n, hidden] what the head of the model without that layer reads."""
        inner = self.model.model
        x = inner.embed_tokens(torch.tensor([tokens]))
        for layer in inner.layers[:-1]:
            x = self._layer(layer, x)
        return inner.norm(x)[0]

    def _streams(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        both = [
            self._norm(embedded, self.how.embedding_norm),
            self._norm(features, self.how.feature_norm),
        ]
        x = torch.cat(both[:: -1 if self.how.feature_first else 1], dim=1)
        x = x @ self.own[f"{self.how.join}.weight"].T
        return self._layer(self.model.model.layers[-1], x[None])[0]

    def _said(self, streams: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(self._norm(streams, self.how.norm))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        epsilon = self.model.config.rms_norm_eps
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        return x * scale * (self.how.offset + self.own[f"{name}.weight"])

    def _layer(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        found = layer(
            x,
            attention_mask=None if hasattr(layer, "linear_attn") else mask,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        return found[0] if isinstance(found, tuple) else found


def make_predicting(kind: str, folder: Path, **more: Any) -> Predicting:
    """Save the checkpoint of a golden kind whose last layer is one that predicts further tokens."""
    how, changes = PREDICTING[kind]
    golden = make_golden(kind, folder, **{**changes, **more})
    file, inner = folder / "model.safetensors", golden.model.model
    tensors, last = load_file(file), len(inner.layers) - 1
    width = golden.model.config.hidden_size
    drawn = torch.Generator().manual_seed(7)
    own = {
        f"{name}.weight": 1 - how.offset + 0.2 * torch.randn(width, generator=drawn)
        for name in (how.embedding_norm, how.feature_norm, how.norm)
    }
    own[f"{how.join}.weight"] = SPREAD * torch.randn(width, 2 * width, generator=drawn)
    before, at = f"model.layers.{last}.", how.at.format(last=last)
    for name in [name for name in tensors if name.startswith(before)]:
        tensors[at + how.layer + name.removeprefix(before)] = tensors.pop(name)
    tensors |= {f"{at}{name}": tensor for name, tensor in own.items()}
    there = {name: tensors[each] for name, each in how.copies if each in tensors}
    tensors |= {f"{at}{name}": tensor.clone() for name, tensor in there.items()}
    save_file({name: x.contiguous() for name, x in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": last, **how.config}
    kinds = [name for name in config if name.endswith("layer_types") and config[name]]
    config |= {name: config[name][:last] for name in kinds}
    (folder / "config.json").write_text(json.dumps(config))
    return Predicting(folder, golden.model, how, own)
