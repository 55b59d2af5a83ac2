"""The one native decoder: from a spec and weights to a model that runs steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import Heads, KVScales, StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.models.layer import Step, make_layer, make_norm
from tokenpod.models.layer_spec import Rope
from tokenpod.models.linear import Delta, Product, Products, Weights, no_delta
from tokenpod.models.rope import pair_frequencies
from tokenpod.models.spec import ModelSpec
from tokenpod.models.weights import HEAD


class Decoder:
    """The `LoadedModel` of a family that we have.

    `weights` maps the names of `weights_of` to what is on one device, and is empty afterwards:
    layers may hold them in another layout. Of a model that ranks divide, `config`, `weights` and
    `ops` are one rank's; `parameters` then counts those of all, each once. `delta` says what
    products of which tokens are changed to; where there are `adapters`, that is theirs.
    """

    captures = True
    pool_class = KVPool

    def __init__(
        self,
        config: ModelSpec,
        weights: Weights,
        ops: Operations,
        *,
        parameters: int | None = None,
        kv_scales: KVScales | None = None,
        delta: Delta = no_delta,
        unused: Mapping[str, int] = MappingProxyType({}),
        adapters: AdapterStore | None = None,
        quantization: str = "",
    ) -> None:
        self.config = config
        #: How many tensors of the checkpoint belong to each part that is not served.
        self.unused: Mapping[str, int] = unused
        self.quantization = quantization
        held = sum(weight.numel() for weight in weights.values())
        #: Of the whole model.
        self.parameters_count = held if parameters is None else parameters
        #: Bytes that this rank holds.
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        #: [layers, K] each, for keys and values of 8 bits; None: the checkpoint has none.
        self.kv_scales: KVScales | None = kv_scales
        self._ops = ops
        table = weights["embedding"]
        assert isinstance(table, torch.Tensor)
        self._table, self._dtype, self.device = table, table.dtype, table.device
        #: None: products are never adapted.
        self.adapters = adapters
        adapted = adapters is not None and adapters.slots > 0
        products = Products(ops, weights, delta)
        if adapted and adapters is not None:
            products = Products(ops, weights, adapters.delta, adapters.meet)
        self._rotations, numbers = rotations_of(config, table.device)
        self._layers = [
            make_layer(layer, products, i, numbers[i]) for i, layer in enumerate(config.layers)
        ]
        self._norm = make_norm(config.norm, products, "norm")
        self._head = _head(config, products, adapters)
        self._embed = _embedding(config, products, adapters)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, of keys and values, and of weights in no format of fewer bits."""
        return self._dtype

    @torch.inference_mode()
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
        step = step_of(self.config, self._ops, self._rotations, batch, pool, self._dtype)
        x = self._embed(batch)
        streams: dict[int, torch.Tensor] = {}
        for at, layer in enumerate(self._layers):
            if at in taps:
                streams[at] = x.clone()
            x = layer(x, step)
        return self._norm(x), [streams[at] for at in taps]

    def embed_tokens(self, t_token: torch.Tensor) -> torch.Tensor:
        """[T, width] rows of the embedding's table, of tokens [T] int64; ranks call it together."""
        return self._ops.embed(self._table, t_token)

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens."""
        return tiles_of(self.config, self._ops, self._dtype, self.device, rows)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, step: ForwardBatch | None = None) -> torch.Tensor:
        """Hidden [T, hidden] -> [n, vocabulary] in the model's dtype, an inference tensor.

        At `logit_index` of the step that these are the tokens of; without a step, of all.
        """
        if step is not None and step.logit_index is not None:
            hidden = hidden.index_select(0, step.logit_index)
            step = step.at(step.logit_index)
        return self._head(hidden, step)


Rotations = list[tuple[torch.Tensor, float]]


def step_of(
    config: ModelSpec,
    ops: Operations,
    rotations: Rotations,
    batch: ForwardBatch,
    pool: KVPool,
    dtype: torch.dtype,
) -> Step:
    """What all layers of a model share of a step; `rotations` are those of `rotations_of`."""
    latent = config.latent
    if latent is None:
        plans = {w: ops.plan_attention(batch, w) for w in set(config.windows)}
    else:
        plans = {None: ops.plan_latent(batch, latent.shape)}
    turned = [
        ops.rotate(batch.t_position, frequencies, scale, dtype) for frequencies, scale in rotations
    ]
    return Step(batch, pool, plans=plans, rotations=turned)


def tiles_of(
    config: ModelSpec, ops: Operations, dtype: torch.dtype, device: torch.device, rows: int
) -> StepTiles:
    """How captured steps of up to so many rows describe rows with several tokens to a model."""
    assert ops.prepare_capture is not None, "these operations are not captured"
    kv = config.kv
    shape = Heads(config.heads, kv.heads, kv.key_dim, dtype, device)
    # Rows of latents are the same to all of a row's tokens: attention needs no row starts.
    seen = set() if config.latent else set(config.windows)
    windows = sorted(seen, key=lambda window: window or 0)
    return ops.prepare_capture(shape, windows, rows)


def rotations_of(config: ModelSpec, device: torch.device) -> tuple[Rotations, list[int]]:
    """The different rotations of layers, as frequencies and a scale, and which one each has."""
    found: dict[Rope | None, int] = {}
    turned = config.layers[0].attention.turned_dim
    numbers = []
    for layer in config.layers:
        positions = layer.attention.positions
        rope = positions if isinstance(positions, Rope) else None
        numbers.append(found.setdefault(rope, len(found)))
    return [
        (pair_frequencies(rope, turned).to(device), rope.scale if rope else 1.0) for rope in found
    ], numbers


def _embedding(
    config: ModelSpec, products: Products, adapters: AdapterStore | None
) -> Callable[[ForwardBatch], torch.Tensor]:
    spec, ops = config.embedding, products.ops
    table = products.tensor("embedding")
    # Rounded as the embedding is, as in the models' own training code.
    scale = float(torch.tensor(spec.scale, dtype=table.dtype))
    project = products.linear("project_in") if spec.width is not None else None
    learned = None if spec.positions is None else products.tensor("positions")
    offset = 0 if spec.positions is None else spec.positions.offset
    norm = make_norm(spec.norm, products, "embedding_norm")
    copies = adapters.copies if adapters is not None else None

    def embed(batch: ForwardBatch) -> torch.Tensor:
        added = adapters.embedded(batch) if adapters is not None else None
        x = ops.embed(table, batch.t_token, added.add if added is not None else None)
        if copies is not None and batch.t_adapter is not None:
            x = copies.embedded(x, batch.t_token, batch.t_adapter, ops.embed)
        if scale != 1.0 and not spec.scales_given:
            x *= scale
        if batch.given is not None:
            x.index_copy_(0, batch.given.t_index, batch.given.rows)
        if scale != 1.0 and spec.scales_given:
            x *= scale
        if project is not None:
            x = project(x, batch)
        if learned is not None:
            x += learned.index_select(0, batch.t_position + offset)
        return norm(x)

    return embed


def _head(config: ModelSpec, products: Products, adapters: AdapterStore | None) -> Product:
    """Without the embedding's table, which it may have in another layout."""
    project = products.linear("project_out") if config.embedding.width is not None else None
    if config.head.tied and HEAD not in products.weights:
        products.weights[HEAD] = products.weights["embedding"]
    product, group = products.linear(HEAD), products.ops.group
    own_linear = products.ops.own_linear
    copies = adapters.copies if adapters is not None else None
    vocabulary, scale, softcap = config.vocab_size, config.head.scale, config.head.softcap

    def head(hidden: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        if project is not None:
            hidden = project(hidden, step)
        logits = product(hidden, step if adapters is None else adapters.at_head(step))
        if copies is not None and step is not None and step.t_adapter is not None:
            logits = copies.logits(logits, hidden, step.t_adapter, own_linear)
        if group is not None:
            logits = group.gather(logits)
        # Ranks that share a vocabulary may have a few rows beyond its end.
        logits = logits[:, :vocabulary]
        if scale != 1.0:
            logits = logits * scale
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    return head
