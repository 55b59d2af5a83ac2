"""The two ends of a decoder: from tokens to the stream, and from the stream to logits."""

from __future__ import annotations

import torch

from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.weight import LinearWeight
from tokenpod.kernels.products.formats.narrow import NarrowWeight
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.models.layers.linear import Products
from tokenpod.models.layers.norms import make_norm
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.weights import HEAD


class TokenEmbedding:
    """From tokens, and what is given in their place, to the stream."""

    def __init__(
        self,
        config: ModelSpec,
        products: Products,
        adapters: AdapterStore | None,
        dtype: torch.dtype,
    ) -> None:
        spec = config.embedding
        self._ops, self._adapters = products.ops, adapters
        self._copies = adapters.copies if adapters is not None else None
        self._table, self._dtype = products.tensor("embedding"), dtype
        # Rounded as the stream is, as in the models' own training code.
        scale = float(torch.tensor(spec.scale, dtype=dtype))
        self._scale_rows = 1.0 if spec.scales_given else scale
        self._scale_all = scale if spec.scales_given else 1.0
        self._project = products.linear("project_in") if spec.width is not None else None
        self._learned, self._offset = None, 0
        if spec.positions is not None:
            self._learned, self._offset = products.tensor("positions"), spec.positions.offset
        self._types = products.tensor("token_types") if spec.token_types else None
        self._second_text = config.second_text
        self._norm = make_norm(spec.norm, products, "embedding_norm")

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """A step's tokens -> [T, hidden]."""
        added = self._adapters.embedded(batch) if self._adapters is not None else None
        embed, t_token, of_second = self._ops.embed, batch.t_token, None
        if self._second_text:
            of_second = t_token >= self._second_text
            t_token = t_token - of_second * self._second_text
        x = embed(self._table, t_token, added.add if added is not None else None, self._dtype)
        if self._copies is not None and batch.t_adapter is not None:
            x = self._copies.embedded(x, batch.t_token, batch.t_adapter, embed)
        if self._scale_rows != 1.0:
            x *= self._scale_rows
        if batch.given is not None:
            x.index_copy_(0, batch.given.t_index, batch.given.rows[:, : x.shape[1]])
        if self._scale_all != 1.0:
            x *= self._scale_all
        if self._project is not None:
            x = self._project(x, batch)
        if self._learned is not None:
            x += self._learned.index_select(0, batch.t_position + self._offset)
        if self._types is not None:
            x += self._types[0] if of_second is None else self._types[of_second.long()]
        return self._norm(x)


class PerLayerEmbedding:
    """What each layer reads of a token: a row of a table, and a product of the first stream."""

    def __init__(self, config: ModelSpec, products: Products, dtype: torch.dtype) -> None:
        spec = config.embedding.per_layer
        assert spec is not None
        self._ops, self._layers, self._width = products.ops, len(config.layers), spec.width
        self._table, self._dtype = products.tensor("per_layer_embedding"), dtype
        # Rounded as rows are.
        self._row_scale = float(torch.tensor(spec.width**0.5, dtype=dtype))
        self._project = products.linear("per_layer_projection")
        self._stream_scale = config.hidden_size**-0.5
        self._norm = make_norm(spec.norm, products, "per_layer_norm")

    def __call__(self, batch: ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        """A step's tokens, and the stream [T, hidden] before layers -> [T, layers, width]."""
        shape = (len(x), self._layers, self._width)
        rows = self._ops.embed(self._table, batch.t_token, dtype=self._dtype)
        rows = rows.view(shape) * self._row_scale
        made = (self._project(x, batch) * self._stream_scale).view(shape)
        return self._norm(made).add_(rows).mul_(0.5**0.5)


class TextHead:
    """From the stream to logits, without the embedding's table, which may have another layout."""

    def __init__(
        self,
        config: ModelSpec,
        products: Products,
        adapters: AdapterStore | None,
        dtype: torch.dtype,
    ) -> None:
        self._ops, self._adapters = products.ops, adapters
        self._copies = adapters.copies if adapters is not None else None
        self._project = None
        if config.embedding.width is not None:
            self._project = products.linear("project_out")
        if config.head.tied and HEAD not in products.weights:
            table = products.weights["embedding"]
            assert isinstance(table, torch.Tensor)
            narrow = table.dtype != dtype
            products.weights[HEAD] = LinearWeight((NarrowWeight(table),)) if narrow else table
        self._product = products.linear(HEAD)
        self._vocabulary = config.vocab_size
        self._scale, self._softcap = config.head.scale, config.head.softcap

    def __call__(self, hidden: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        """Hidden [n, hidden] -> logits [n, vocabulary]; of a step, which adapters ask for."""
        if self._project is not None:
            hidden = self._project(hidden, step)
        adapters, copies, group = self._adapters, self._copies, self._ops.group
        logits = self._product(hidden, step if adapters is None else adapters.at_head(step))
        if copies is not None and step is not None and step.t_adapter is not None:
            logits = copies.logits(logits, hidden, step.t_adapter, self._ops.own_linear)
        if group is not None:
            logits = group.gather(logits)
        # Ranks that share a vocabulary may have a few rows beyond its end.
        logits = logits[:, : self._vocabulary]
        if self._scale != 1.0:
            logits = logits * self._scale
        cap = self._softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
