"""A model that transformers' own code computes, one ragged row per step."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import KVScales, StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.models.pooling.head import PoolingHead
from tokenpod.models.tier.dispatch import Answer, AttentionFunction, Dispatch, RunningStep
from tokenpod.models.tier.halves import Halves
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

    def __init__(self, t_place: torch.Tensor) -> None:
        super().__init__(layers=[])
        count = torch.arange(len(t_place), device=t_place.device)
        self._before = t_place - count

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


def hidden_of(halves: Halves, t_token: torch.Tensor, t_place: torch.Tensor) -> torch.Tensor:
    """[T] each -> [T, hidden], after the last norm."""
    output = halves.run(
        input_ids=t_token[None],
        position_ids=t_place[None],
        past_key_values=StepPositions(t_place),
        use_cache=False,
    )
    states: torch.Tensor = output[0]
    return states[0]


class TransformersModel(ABC):
    """A model that transformers computes; see `models.decoders.facts.LoadedModel`.

    Args:
        spec: what is known of it.
        halves: the model, in inference mode, on its device.
        ops: of its device.
        unused: how many tensors belong to each part that is not served.
    """

    #: Steps are launched call by call: transformers' code may look at values on the host.
    captures = 0
    #: None: pools of 8 bits are refused.
    kv_scales: Sequence[KVScales] | None = None
    pool_class: Callable[..., KVPool] = KVPool

    def __init__(
        self, spec: TierSpec, halves: Halves, ops: Operations, unused: Mapping[str, int]
    ) -> None:
        self.config = spec
        self.unused = unused
        self.adapters: AdapterStore | None = None
        self.pooling: PoolingHead | None = None
        self.quantization = ""
        held = list(halves.model.parameters())
        self.parameters_count = sum(weight.numel() for weight in held)
        self.weight_bytes = sum(weight.nbytes for weight in [*held, *halves.model.buffers()])
        self._halves, self._ops = halves, ops
        self._dtype, self._device = halves.model.dtype, halves.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of keys and values."""
        return self._dtype

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """Run a step's tokens; keep what later tokens need of them.

        Returns [T, hidden] after the last norm. Raises NotImplementedError for tokens that have an
        embedding of their own, or an adapter: these are given to products that are ours.
        """
        if batch.given is not None or batch.t_adapter is not None:
            raise NotImplementedError(f"{self.config.architecture}: given embeddings or adapters")
        return self._hidden(batch, pool)

    @abstractmethod
    def _hidden(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """[T, hidden] of a step whose tokens all have ids."""

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, step: ForwardBatch | None = None) -> torch.Tensor:
        """Hidden [T, hidden] -> [n, vocabulary] in the model's dtype.

        At `logit_index` of the step that these are the tokens of; without a step, of all.
        """
        if step is not None and step.logit_index is not None:
            hidden = hidden.index_select(0, step.logit_index)
        return self._halves.logits(hidden).to(self._dtype)

    def first_layers(self) -> AbstractContextManager[None]:
        """All layers: which of them are alike is not known."""
        return nullcontext()

    def prepare_capture(self, rows: int) -> StepTiles:
        """Nothing is captured, so nothing has tiles."""
        assert self._ops.prepare_capture is not None, "these operations are not captured"
        return self._ops.prepare_capture([], rows)


class TierModel(TransformersModel):
    """One ragged row per step, over our pool.

    Args:
        spec: what is known of it.
        halves: the model, in inference mode, on its device.
        hosted: the names that it calls attention by.
        dispatches: what those calls are.
        ops: of its device.
        unused: see `TransformersModel`.
    """

    def __init__(
        self,
        spec: TierSpec,
        halves: Halves,
        hosted: Hosted,
        dispatches: tuple[Dispatch, ...],
        ops: Operations,
        unused: Mapping[str, int],
    ) -> None:
        super().__init__(spec, halves, ops, unused)
        self._hosted, self._dispatches = hosted, dispatches

    def _hidden(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        step = RunningStep(self._dispatches, batch, pool, self._ops)
        with self._hosted.answering(step):
            hidden = hidden_of(self._halves, batch.t_token, batch.t_place)
        step.check()
        return hidden
