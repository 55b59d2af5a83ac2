"""What the engine asks of a model, whoever computes it: our decoder or transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tokenpod.core.model_size import Expansion
from tokenpod.core.own_state import OwnState
from tokenpod.kernels.cache.kv_pool import KVLayout, KVPool
from tokenpod.kernels.operations.attention_ops import KVScales, StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.models.pooling.head import PoolingHead


def ends_within(token_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """Tokens that end a text, of those that there are: some files write -1 for none."""
    return frozenset(token_id for token_id in token_ids if 0 <= token_id < vocab_size)


class ModelFacts(Protocol):
    """What is known of a model before its weights are."""

    @property
    def architecture(self) -> str:
        """As config.json names it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def hidden_size(self) -> int:
        """Features of a token between layers."""
        ...

    @property
    def widest(self) -> int:
        """Features that one token has within a feed-forward block, at most."""
        ...

    @property
    def max_positions(self) -> int:
        """Positions that the model can address."""
        ...

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """What each layer's pool has for a token."""
        ...

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """How far back each of these is read; None: it must have all of a sequence's tokens."""
        ...

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Query heads of each layer."""
        ...

    @property
    def sliding_window(self) -> int | None:
        """The furthest that any layer looks back; None if one sees everything."""
        ...

    @property
    def dtype(self) -> torch.dtype | None:
        """What the checkpoint says its weights are; None if it does not."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        ...

    @property
    def rope_variant(self) -> str:
        """Which factors rotation uses where the checkpoint has several; empty if it has not."""
        ...

    @property
    def own_positions(self) -> bool:
        """Whether positions may be other than places, of three axes (multimodal rotation)."""
        ...

    @property
    def runs_on(self) -> str:
        """Whose code computes it: "tokenpod" or "transformers"."""
        ...

    @property
    def expansion(self) -> Expansion | None:
        """What attention over latent rows makes of them; None: there are none."""
        ...

    @property
    def encodes(self) -> bool:
        """Whether each token sees all of its text: it must be in one step."""
        ...

    @property
    def mutual(self) -> int:
        """How many tokens of an image may see each other in some layers; 0: none do."""
        ...

    @property
    def mutual_prompts(self) -> bool:
        """Whether all tokens of a prompt see each other."""
        ...

    @property
    def second_text(self) -> int:
        """What is added to the id of a token of a second text; 0: nothing is."""
        ...

    @property
    def own_state(self) -> OwnState | None:
        """None: all that is kept of a sequence lies in the pool's slots."""
        ...


class LoadedModel(Protocol):
    """A model ready to run. It holds no state of sequences: that is all in the pool."""

    #: Makes the pool that it runs with, of what `KVPool` takes.
    pool_class: Callable[..., KVPool]

    #: Tokens of the largest steps that are captured, where there are GPUs; 0: none are.
    captures: int
    #: Each layer's, for keys and values of 8 bits; None: the checkpoint has none.
    kv_scales: Sequence[KVScales] | None
    #: Of the whole model.
    parameters_count: int
    #: Bytes that this rank holds.
    weight_bytes: int
    #: How many tensors of the checkpoint belong to each part that is not served.
    unused: Mapping[str, int]
    #: None: its products are never adapted.
    adapters: AdapterStore | None
    #: What makes vectors of its states; None: it generates.
    pooling: PoolingHead | None
    #: What weights of fewer bits are held in, such as "int8" or "gptq int4"; empty: there are none.
    quantization: str

    @property
    def config(self) -> ModelFacts:
        """What is known of it; of a model that ranks divide, of this rank's part."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of keys and values in no format of fewer bits."""
        ...

    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """Run a step's tokens; write their keys and values to the pool.

        Returns [T, hidden] after the last norm.
        """
        ...

    def logits(self, hidden: torch.Tensor, step: ForwardBatch | None = None) -> torch.Tensor:
        """Hidden [T, hidden] -> [n, vocabulary] in the model's dtype.

        At `logit_index` of the step that these are the tokens of; without a step, of all.
        """
        ...

    def first_layers(self) -> AbstractContextManager[None]:
        """In which steps run as many of the first layers as launch all kernels."""
        ...

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens."""
        ...
