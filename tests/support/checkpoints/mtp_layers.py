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


@dataclass
class Predicting:
    """A checkpoint, transformers' model with one layer more, and the other tensors of that."""

    folder: Path
    model: Any
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

    def features(self, tokens: list[int]) -> torch.Tensor:
        """[n, hidden] what the head of the model without that layer reads."""
        inner = self.model.model
        x = inner.embed_tokens(torch.tensor([tokens]))
        for layer in inner.layers[:-1]:
            x = self._layer(layer, x)
        return inner.norm(x)[0]

    def _streams(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        both = torch.cat([self._norm(embedded, "enorm"), self._norm(features, "hnorm")], dim=1)
        x = both @ self.own["eh_proj.weight"].T
        return self._layer(self.model.model.layers[-1], x[None])[0]

    def _said(self, streams: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(self._norm(streams, "shared_head.norm"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        epsilon = self.model.config.rms_norm_eps
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        return x * scale * self.own[f"{name}.weight"]

    def _layer(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        positions = torch.arange(n)[None]
        found = layer(
            x,
            attention_mask=torch.full((n, n), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        return found[0] if isinstance(found, tuple) else found


def make_predicting(kind: str, folder: Path, **more: Any) -> Predicting:
    """Save the checkpoint of a golden kind whose last layer is one that predicts further tokens."""
    golden = make_golden(kind, folder, **more)
    file, inner = folder / "model.safetensors", golden.model.model
    tensors, last = load_file(file), len(inner.layers) - 1
    width = golden.model.config.hidden_size
    drawn = torch.Generator().manual_seed(7)
    own = {
        f"{name}.weight": 1 + 0.2 * torch.randn(width, generator=drawn)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    own["eh_proj.weight"] = SPREAD * torch.randn(width, 2 * width, generator=drawn)
    copies = {"embed_tokens.weight": "model.embed_tokens.weight"}
    copies["shared_head.head.weight"] = "lm_head.weight"
    at = f"model.layers.{last}."
    tensors |= {f"{at}{name}": tensor for name, tensor in own.items()}
    there = {name: tensors[each] for name, each in copies.items() if each in tensors}
    tensors |= {f"{at}{name}": tensor.clone() for name, tensor in there.items()}
    save_file({name: x.contiguous() for name, x in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return Predicting(folder, golden.model, own)
