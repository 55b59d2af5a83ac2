"""The two halves of transformers' causal models: up to the last norm, and from there to logits."""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

from tokenpod.models.tier.errors import NotServed


def base_of(model: Any) -> Any:
    """What a model computes up to its last norm; of an encoder with a decoder, the decoder.

    Raises NotServed if it has no module for that.
    """
    if model.config.is_encoder_decoder:
        base = model.get_decoder()
    else:
        base = model.base_model
        if base is model:  # as Llama 4's text model, whose prefix is that of the whole
            base = getattr(model, "model", model)
    if base is not model and "input_ids" not in arguments_of(base):
        base = model.get_decoder()  # of an encoder's and decoder's class without its encoder
    if base is model or base is None:
        raise NotServed("its class has no base model apart from its head")
    return base


def arguments_of(module: Any) -> Container[str]:
    """By name."""
    return inspect.signature(type(module).forward).parameters


class Halves:
    """The two halves of a model: its base, and what it does with that.

    transformers has both in one forward. The second half is that forward with a base that has the
    answer already, so it does to logits whatever the model's class does.
    """

    def __init__(self, model: Any) -> None:
        self.model: PreTrainedModel = model
        base = base_of(model)
        #: What the base can be told.
        self.arguments = arguments_of(base)
        self._forward = base.forward
        self._answer: Any = None
        self._kind: type[Any] = BaseModelOutputWithPast
        #: Where a prompt is read apart; None: the base reads all of a text.
        self.encoder: Any = model.get_encoder() if model.config.is_encoder_decoder else None
        self._encoded: type[Any] = BaseModelOutput
        base.forward = self._base_forward

    def _base_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._answer is not None:
            return self._answer
        return self._forward(*args, **kwargs)

    def run(self, **arguments: Any) -> Any:
        """The base's output, whose first part is [B, T, hidden], after the last norm."""
        output = self._forward(**arguments)
        self._kind = type(output)
        return output

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, n] -> [B, n, hidden], by the encoder."""
        output = self.encoder(input_ids=tokens)
        self._encoded = type(output)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        self._answer = self._kind(last_hidden_state=hidden[None])
        tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        named: dict[str, Any] = {"input_ids": tokens}
        if self.encoder is not None:
            read = self._encoded(last_hidden_state=hidden[None])
            named = {"decoder_input_ids": tokens, "encoder_outputs": read}
        try:
            logits: torch.Tensor = self.model(**named, use_cache=False).logits
        finally:
            self._answer = None
        return logits[0]
