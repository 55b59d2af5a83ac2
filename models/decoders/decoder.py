"""The one native decoder: from a spec and weights to a model that runs steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.state_pool import StatePool
from tokenpod.kernels.operations.attention_ops import KVScales, StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.models.decoders.ends import PerLayerEmbedding, TextHead, TokenEmbedding
from tokenpod.models.decoders.layer import make_layer
from tokenpod.models.decoders.step_plans import StepPlans
from tokenpod.models.layers.attention import Attention
from tokenpod.models.layers.linear import Delta, Products, Weights, no_delta
from tokenpod.models.layers.mixer import MixerParts
from tokenpod.models.layers.norms import make_norm
from tokenpod.models.pooling.head import PoolingHead
from tokenpod.models.specs.layer_spec import Mlp
from tokenpod.models.specs.spec import ModelSpec

#: Steps of more tokens than this take a GPU longer than Python takes to launch them, where texts
#: are generated: of 8B weights. Larger ones of smaller models have few rows that decode.
_MOST_CAPTURED = 1024
#: Seconds that Python takes to launch a layer's kernels, and for what else there is in a step; and
#: operations per second of the matrix units of a GPU, in steps of small models.
_LAYER_SECONDS, _STEP_SECONDS, _RATE = 0.45e-3, 3e-3, 4e14


class Decoder:
    """The `LoadedModel` of a family that we have.

    `weights` maps the names of `weights_of` to what is on one device, and is empty afterwards:
    layers may hold them in another layout. Of a model that ranks divide, `config`, `weights` and
    `ops` are one rank's; `parameters` then counts those of all, each once. `delta` says what
    products of which tokens are changed to; where there are `adapters`, that is theirs. `dtype` is
    that of activations; None: that of the embedding.
    """

    def __init__(
        self,
        config: ModelSpec,
        weights: Weights,
        ops: Operations,
        *,
        parameters: int | None = None,
        kv_scales: Sequence[KVScales] | None = None,
        delta: Delta = no_delta,
        unused: Mapping[str, int] = MappingProxyType({}),
        adapters: AdapterStore | None = None,
        quantization: str = "",
        pooling: PoolingHead | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        #: What makes vectors of its states; None: it generates.
        self.pooling = pooling
        #: How many tensors of the checkpoint belong to each part that is not served.
        self.unused: Mapping[str, int] = unused
        self.quantization = quantization
        held = sum(weight.numel() for weight in weights.values())
        #: Of the whole model.
        self.parameters_count = held if parameters is None else parameters
        #: Bytes that this rank holds.
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        #: Each layer's, for keys and values of 8 bits; None: the checkpoint has none.
        self.kv_scales = kv_scales
        self._ops = ops
        table = weights["embedding"]
        assert isinstance(table, torch.Tensor)
        self._table, self._dtype, self.device = table, dtype or table.dtype, table.device
        #: None: products are never adapted.
        self.adapters = adapters
        adapted = adapters is not None and adapters.slots > 0
        products = Products(ops, weights, delta)
        if adapted and adapters is not None:
            products = Products(ops, weights, adapters.delta, adapters.meet)
        #: Makes the pool that it runs with.
        self.pool_class: Callable[..., KVPool] = KVPool
        if config.state_layouts:
            self.pool_class = partial(
                StatePool, state_layouts=config.state_layouts, state_dtype=self._dtype
            )
        self.captures = _captured_tokens(config, self.parameters_count, texts=pooling is not None)
        #: Whether a step of single tokens runs the same operations whatever they are.
        self.repeats = ops.group is None and all(
            isinstance(layer.mixer, Attention)
            and layer.beside is None
            and isinstance(layer.mlp, Mlp)
            for layer in config.layers
        )
        self._plans = StepPlans(config.mixers, ops, self._dtype, self.device)
        self._layers = [
            make_layer(
                layer,
                MixerParts(
                    products,
                    i,
                    config.cache_of(i),
                    config.state_of(i),
                    self._plans.rotation(layer.mixers),
                ),
            )
            for i, layer in enumerate(config.layers)
        ]
        self._norm = make_norm(config.norm, products, "norm")
        self._head: TextHead | None = None
        if pooling is None:
            self._head = TextHead(config, products, adapters, self._dtype)
        self._embed = TokenEmbedding(config, products, adapters, self._dtype)
        self._per_layer: PerLayerEmbedding | None = None
        if config.embedding.per_layer is not None:
            self._per_layer = PerLayerEmbedding(config, products, self._dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of keys and values."""
        return self._dtype

    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """Run a step's tokens; write their keys and values to the pool.

        Returns [T, hidden] after the final norm, an inference tensor.
        """
        return self.forward_tapped(batch, pool, ())[0]

    @torch.inference_mode()
    def forward_tapped(
        self, batch: ForwardBatch, pool: KVPool, taps: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same, and the streams [T, hidden] before these layers, in their order."""
        if self.adapters is not None:
            batch = self.adapters.prepared(batch)
        if isinstance(pool, StatePool):
            pool.reserve(max(batch.b_row) + 1)
        x = self._embed(batch)
        per_layer = None if self._per_layer is None else self._per_layer(batch, x)
        step = self._plans.step(batch, pool, per_layer)
        streams: dict[int, torch.Tensor] = {}
        for at, layer in enumerate(self._layers):
            if at in taps:
                streams[at] = x.clone()
            x = layer(x, step)
            if batch.given is not None:
                batch.given.add_behind(at, x)
        return self._norm(x), [streams[at] for at in taps]

    @contextmanager
    def first_layers(self) -> Iterator[None]:
        """Meanwhile, only run as many layers as have one of each kind, and one behind these.

        That one finds memory as all others do.
        """
        layers, self._layers = self._layers, self._layers[: self.config.layers_of_all_kinds + 1]
        try:
            yield
        finally:
            self._layers = layers

    def embed_tokens(self, t_token: torch.Tensor) -> torch.Tensor:
        """[T, width] rows of the embedding's table, of tokens [T] int64; ranks call it together."""
        return self._ops.embed(self._table, t_token, dtype=self._dtype)

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens."""
        return self._plans.tiles(rows, texts=self.pooling is not None)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, step: ForwardBatch | None = None) -> torch.Tensor:
        """Hidden [T, hidden] -> [n, vocabulary] in the model's dtype, an inference tensor.

        At `logit_index` of the step that these are the tokens of; without a step, of all.
        """
        if step is not None and step.logit_index is not None:
            hidden = hidden.index_select(0, step.logit_index)
            step = step.at(step.logit_index)
        assert self._head is not None, "a model that makes vectors samples nothing"
        return self._head(hidden, step)


def _captured_tokens(config: ModelSpec, parameters: int, *, texts: bool) -> int:
    """Tokens of the largest steps that are captured.

    Of `texts` those that take Python longer than a GPU: all that a small encoder has.
    """
    if not texts:
        return _MOST_CAPTURED
    if config.own_state is not None:
        return 0  # chunks of rows are counted for steps of few texts
    weights = max(parameters - config.vocab_size * config.hidden_size, 1)
    seconds = len(config.layers) * _LAYER_SECONDS + _STEP_SECONDS
    return int(seconds * _RATE / (2 * weights))
