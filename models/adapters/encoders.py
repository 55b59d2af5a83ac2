"""Networks that prompts are trained through, run once: afterwards their outputs are the prompt.

PEFT writes what they make of a prompt, and not themselves; a state that was saved whole, as by a
trainer's checkpoint, has them instead. Layout: huggingface/peft, `PromptEncoder` (src/peft/tuners/
p_tuning/model.py) and `PrefixEncoder` (src/peft/tuners/prefix_tuning/model.py), version 0.21:

    P-tuning        embedding -> [lstm_head, of both directions] -> mlp_head, ReLU between
    prefix tuning   embedding -> transform, tanh between
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from tokenpod.models.checkpoints.errors import ModelError

#: Layers of an LSTM, at most: each is run over all virtual tokens.
_MOST_LAYERS = 16
_LSTM = re.compile(r"lstm_head\.(?:weight|bias)_[ih]h_l(\d{1,2})(?:_reverse)?")

Tensors = Mapping[str, torch.Tensor]


def encoded(tensors: Tensors, source: str) -> torch.Tensor:
    """[tokens, numbers] float32: what an encoder makes of its own embeddings.

    Args:
        tensors: of the encoder, float32, by PEFT's names within it.
        source: for errors.

    Raises:
        ModelError: a tensor is missing, of another shape, or of no encoder.
    """
    left = dict(tensors)
    x = left.pop("embedding.weight", None)
    if x is None or x.dim() != 2:
        raise ModelError(f"{source}: an encoder of prompts has no embedding.weight of two axes")
    try:
        if recurrent := {name: left.pop(name) for name in tensors if name.startswith("lstm_head.")}:
            x = _recurrent(recurrent, x, source)
        head = "transform" if any(name.startswith("transform.") for name in left) else "mlp_head"
        x = _feed_forward(left, head, x, source)
    except RuntimeError as error:  # torch's, for shapes that do not go together
        raise ModelError(f"{source}: its tensors make no encoder of prompts ({error})") from None
    if left:
        raise ModelError(f"{source}: {sorted(left)[0]} belongs to no encoder that is known")
    return x


def _feed_forward(
    left: dict[str, torch.Tensor], head: str, x: torch.Tensor, source: str
) -> torch.Tensor:
    """Products with an activation between them; what is used is taken out of `left`."""
    between = torch.tanh if head == "transform" else functional.relu
    numbers = sorted(
        int(name.split(".")[1])
        for name in left
        if re.fullmatch(rf"{head}\.\d{{1,2}}\.weight", name)
    )
    for at, number in enumerate(numbers):
        weight, bias = (left.pop(f"{head}.{number}.{end}", None) for end in ("weight", "bias"))
        if weight is None or bias is None:
            raise ModelError(f"{source}: {head}.{number} has no bias")
        x = functional.linear(between(x) if at else x, weight, bias)
    return x


def _recurrent(tensors: Tensors, x: torch.Tensor, source: str) -> torch.Tensor:
    """[tokens, 2 · hidden] of an LSTM of both directions."""
    matches = [_LSTM.fullmatch(name) for name in tensors]
    layers = 1 + max((int(match[1]) for match in matches if match), default=-1)
    first = tensors.get("lstm_head.weight_hh_l0")
    if None in matches or first is None or first.dim() != 2 or layers > _MOST_LAYERS:
        raise ModelError(
            f"{source}: lstm_head is no LSTM of 1 to {_MOST_LAYERS} layers and both directions"
        )
    with torch.device("meta"):  # its own numbers would be drawn for nothing
        network = nn.LSTM(x.shape[1], first.shape[1], layers, bidirectional=True, batch_first=True)
    own = {name.removeprefix("lstm_head."): tensor for name, tensor in tensors.items()}
    network.load_state_dict(own, assign=True)
    with torch.no_grad():
        made: torch.Tensor = network(x[None])[0][0]
    return made
