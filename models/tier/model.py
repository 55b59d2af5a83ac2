"""A model that transformers' own code computes, one ragged row per step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.ops import Heads, KVScales, Operations, StepTiles
from tokenpod.kernels.pool import KVPool
from tokenpod.models.tier.dispatch import Answer, AttentionFunction, Dispatch, RunningStep
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.tier.masks import describe_mask
from tokenpod.models.tier.spec import TierSpec

_numbers = itertools.count()


class Hosted:
    """transformers' model, whose attention is ours.

    transformers finds attention functions by name: there are two names for ours. Under
    `recording` masks are asked for and described; under `running` none are built.
    """

    def __init__(self) -> None:
        self.function = AttentionFunction()
        self.running = f"tokenpod-{next(_numbers)}"
        self.recording = f"{self.running}-recording"
        for name in (self.running, self.recording):
            AttentionInterface.register(name, self.function)
        AttentionMaskInterface.register(self.recording, describe_mask)

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Have `answer` take the calls of attention."""
        self.function.answer = answer
        try:
            yield
        finally:
            self.function.answer = None


class StepPositions(Cache):
    """Says where a step's tokens are to code that asks how many came before; holds no keys.

    Some models (Llama 4) number a step's tokens by that, and not by the positions that they are
    given. Here the answer is one number for each token.
    """

    def __init__(self, t_position: torch.Tensor) -> None:
        super().__init__(layers=[])
        count = torch.arange(len(t_position), device=t_position.device)
        self._before = t_position - count

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:  # type: ignore[override]
        """[T]: a token's position, less its place in the step."""
        del layer_idx
        return self._before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Masks are described as for texts from their beginning."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys are the step's own, as far as masks know."""
        del layer_idx
        return query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As they are: our attention puts them where they belong."""
        del args, kwargs
        return key_states, value_states


class Halves:
    """The two halves of a causal model: its base, up to the last norm, and what it does with that.

    transformers has both in one forward. The second half is that forward with a base that has the
    answer already, so it does to logits whatever the model's class does.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        base = model.base_model
        if base is model:  # as Llama 4's text model, whose prefix is that of the whole
            base = getattr(model, "model", model)
        if base is model:
            raise NotServed("its class has no base model apart from its head")
        if "position_ids" not in inspect.signature(type(base).forward).parameters:
            raise NotServed("its base model can't be told positions")
        self._forward = base.forward
        self._answer: Any = None
        self._kind: type[Any] = BaseModelOutputWithPast
        base.forward = self._base_forward

    def _base_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._answer is not None:
            return self._answer
        return self._forward(*args, **kwargs)

    def hidden(self, t_token: torch.Tensor, t_position: torch.Tensor) -> torch.Tensor:
        """[T] each -> [T, hidden], after the last norm."""
        output = self._forward(
            input_ids=t_token[None],
            position_ids=t_position[None],
            past_key_values=StepPositions(t_position),
            use_cache=False,
        )
        self._kind = type(output)
        states: torch.Tensor = output[0]
        return states[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        self._answer = self._kind(last_hidden_state=hidden[None])
        try:
            tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            self._answer = None
        return logits[0]


class TierModel:
    """A model ready to run; see `models.model.LoadedModel`.

    Args:
        spec: what is known of it.
        halves: the model, in inference mode, on its device.
        hosted: the names that it calls attention by.
        dispatches: what those calls are.
        ops: of its device.
        vocab_size: rows of its head.
    """

    #: Steps are launched call by call: transformers' code may look at values on the host.
    captures = False
    #: None: pools of 8 bits are refused.
    kv_scales: KVScales | None = None

    def __init__(
        self,
        spec: TierSpec,
        halves: Halves,
        hosted: Hosted,
        dispatches: tuple[Dispatch, ...],
        ops: Operations,
    ) -> None:
        self.config = spec
        #: transformers loads all parts of a checkpoint.
        self.unused: Mapping[str, int] = MappingProxyType({})
        held = list(halves.model.parameters())
        self.parameters_count = sum(weight.numel() for weight in held)
        self.weight_bytes = sum(weight.nbytes for weight in [*held, *halves.model.buffers()])
        self._halves, self._hosted, self._dispatches, self._ops = halves, hosted, dispatches, ops
        self._dtype, self._device = halves.model.dtype, halves.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of keys and values."""
        return self._dtype

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """Run a step's tokens; write their keys and values to the pool.

        Returns [T, hidden] after the last norm. Raises NotImplementedError for tokens that have an
        embedding of their own, or an adapter: these are given to products that are ours.
        """
        if batch.given is not None or batch.t_adapter is not None:
            raise NotImplementedError(f"{self.config.architecture}: given embeddings or adapters")
        step = RunningStep(self._dispatches, batch, pool, self._ops)
        with self._hosted.answering(step):
            hidden = self._halves.hidden(batch.t_token, batch.t_position)
        step.check()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, step: ForwardBatch | None = None) -> torch.Tensor:
        """Hidden [T, hidden] -> [n, vocabulary] in the model's dtype.

        At `logit_index` of the step that these are the tokens of; without a step, of all.
        """
        if step is not None and step.logit_index is not None:
            hidden = hidden.index_select(0, step.logit_index)
        return self._halves.logits(hidden).to(self._dtype)

    def prepare_capture(self, rows: int) -> StepTiles:
        """Nothing is captured, so nothing has tiles."""
        assert self._ops.prepare_capture is not None, "these operations are not captured"
        kv = self.config.kv_layouts[0]
        shape = Heads(self.config.head_counts[0], kv.heads, kv.key_dim, self._dtype, self._device)
        return self._ops.prepare_capture(shape, [], rows)
