"""An EAGLE-3 head in torch, as it is trained: see `tokenpod.models.eagle` for what it computes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from demo_model.network import Decoder, GatedMlp, Shape, rotate  # noqa: E402

#: Of the feed-forward block; and how many guesses behind one another are trained.
INNER, DEPTH = 768, 5


def streams_of(model: Decoder, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of ids [rows, length]: the stream before each layer, and logits [.., vocabulary]."""
    cos, sin = model.cos[: ids.shape[1]], model.sin[: ids.shape[1]]
    x, found = model.embed_tokens(ids), []
    for layer in model.layers:
        found.append(x)
        x = layer(x, cos, sin)
    return found, functional.linear(model.norm(x), model.embed_tokens.weight).float()


class Head(nn.Module):
    """The head of a target of this shape; `guesses` [n] int64: the tokens that it can guess."""

    def __init__(self, shape: Shape, guesses: Tensor) -> None:
        super().__init__()
        self.shape = replace(shape, intermediate_size=INNER)
        width, dim = shape.hidden_size, shape.head_dim
        self.keys = shape.num_key_value_heads
        self.groups = shape.num_attention_heads // self.keys
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.q_proj = nn.Linear(2 * width, shape.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * width, self.keys * dim, bias=False)
        self.v_proj = nn.Linear(2 * width, self.keys * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * dim, width, bias=False)
        self.mlp = GatedMlp(self.shape)
        norms = (nn.RMSNorm(width, shape.rms_norm_eps) for _ in range(4))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = norms
        self.lm_head = nn.Linear(width, len(guesses), bias=False)
        self.register_buffer("guesses", guesses)

    def loss(self, target: Decoder, ids: Tensor) -> Tensor:
        """Of ids [rows, length]: the mean over depths of the cross entropy with the target."""
        with torch.no_grad():
            streams, logits = streams_of(target, ids)
            wanted = logits.softmax(-1)[..., self.guesses]
            embedded = target.embed_tokens(ids)
        cos, sin = target.cos[: ids.shape[1]], target.sin[: ids.shape[1]]
        total, weights = torch.zeros((), device=ids.device), 0.0
        for depth, said in enumerate(self.said(embedded, self.features(streams), cos, sin, DEPTH)):
            # The entry of position p says what follows it; the first ones have no guesses before.
            picked = slice(1 + depth, None)
            logs = said[:, picked].float().log_softmax(-1)
            total = total - 0.8**depth * (wanted[:, picked] * logs).sum(-1).mean()
            weights += 0.8**depth
        return total / weights

    def features(self, streams: list[Tensor]) -> Tensor:
        """[rows, length, width] of the target's streams before its layers."""
        layers = len(streams)
        return self.fc(
            torch.cat([streams[at] for at in (2, layers // 2, layers - 3)], dim=-1)
        ).float()

    def said(
        self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, depth: int
    ) -> Iterator[Tensor]:
        """[rows, length, guesses] scores behind each position, guess after guess.

        Those of depth d (from 0) at a position are for a chain that began d positions before: it
        reads the head's own streams since, and the target's up to there.
        """
        length = features.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=features.device).tril()
        before, keys, values = shifted(features, 1), list[Tensor](), list[Tensor]()
        for at in range(depth):
            x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(before)], dim=-1)
            q, k, v = (
                proj(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
                for proj in (self.q_proj, self.k_proj, self.v_proj)
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k, v = (each.repeat_interleave(self.groups, dim=1) for each in (k, v))
            keys, values = [*keys, k], [*values, v]
            # Entries of the target's features up to where the chain began, but none of position 0;
            # then the chain's own, each of which lies so many positions back.
            seen = causal.tril(-at) & (torch.arange(length, device=q.device) > 0)
            scores = (q @ keys[0].transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~seen, -torch.inf)
            own = [shifted(key, at - which, 2) for which, key in enumerate(keys) if which]
            mine = [(q * key).float().sum(-1, keepdim=True) / math.sqrt(q.shape[-1]) for key in own]
            scores[..., 0] = scores[..., 0].masked_fill(~seen.any(-1), 0.0)  # nothing to see there
            share = torch.cat([scores, *mine], dim=-1).softmax(-1).to(v.dtype)
            mixed = share[..., :length] @ values[0]
            for which in range(1, at + 1):
                column = share[..., length + which - 1 : length + which]
                mixed = mixed + column * shifted(values[which], at - which, 2)
            stream = before + self.o_proj(mixed.transpose(1, 2).flatten(2))
            stream = stream + self.mlp(self.post_attention_layernorm(stream))
            yield self.lm_head(self.norm(stream))
            before = shifted(stream, 1)

    @torch.no_grad()
    def scores(self, target: Decoder, ids: Tensor, depth: int) -> list[Tensor]:
        """[1, length, vocabulary] each: see `said`; -inf for what it can't guess."""
        cos, sin = target.cos[: ids.shape[1]], target.sin[: ids.shape[1]]
        streams = streams_of(target, ids)[0]
        said = self.said(streams[0], self.features(streams), cos, sin, depth)
        shape = (*ids.shape, self.shape.vocab_size)
        return [
            torch.full(shape, -torch.inf, device=ids.device).index_copy_(2, self.guesses, each)
            for each in map(Tensor.float, said)
        ]

    @classmethod
    def load(cls, folder: Path, shape: Shape) -> Head:
        """What `save` has written."""
        stored = load_file(folder / "model.safetensors")
        difference = stored.pop("d2t")
        guesses = difference + torch.arange(len(difference))
        head = cls(shape, guesses)
        own = {
            name.removeprefix("midlayer.").removeprefix("self_attn."): weight.float()
            for name, weight in stored.items()
        }
        head.load_state_dict(own | {"guesses": guesses})
        return head

    def save(self, folder: Path) -> None:
        """In the format that the authors of EAGLE-3 publish."""
        folder.mkdir(parents=True, exist_ok=True)
        inside = ("q_proj", "k_proj", "v_proj", "o_proj")
        tensors = {}
        for name, weight in self.state_dict().items():
            if name == "guesses":
                continue
            at = f"self_attn.{name}" if name.split(".")[0] in inside else name
            own = name.split(".")[0] in ("fc", "norm", "lm_head")
            tensors[at if own else f"midlayer.{at}"] = weight.to(torch.bfloat16).cpu().contiguous()
        guesses = self.guesses.cpu()
        tensors["d2t"] = guesses - torch.arange(len(guesses))
        save_file(tensors, folder / "model.safetensors")
        named = config_of(self.shape) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": len(guesses),
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(named, indent=2) + "\n")


def shifted(x: Tensor, by: int, dim: int = 1) -> Tensor:
    """`x` moved to later positions, of dimension `dim`; zeros come in."""
    if not by:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - by)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, by)), kept], dim=dim)


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json of such a model: the embedded one's with other sizes."""
    return json.loads((ROOT / "models" / "demo" / "config.json").read_text()) | asdict(shape)
