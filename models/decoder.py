"""The one native decoder: embedding, layers of attention and gated feed-forward, norm, head.

A layer's feed-forward block is one gated unit, or a mixture of experts.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.batch import ForwardBatch, RaggedRows
from tokenpod.kernels.ops import (
    AddBlock,
    AddLinear,
    HeadNorm,
    Heads,
    KVScales,
    Linear,
    Operations,
    RowNorm,
)
from tokenpod.kernels.pool import KVPool
from tokenpod.models.config import DecoderConfig
from tokenpod.models.linear import add_linear, expert_block, gated_block, linear, norm_linear


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer computes with. Products that read the residual stream norm it first."""

    qkv: Linear
    head_norm: HeadNorm | None
    window: int | None
    output: AddLinear
    feed_forward: AddBlock


class Decoder:
    """A model ready to run. It holds no state of sequences: that is all in the pool.

    `weights` maps the names of a family's weight table to tensors on one device, and is empty
    afterwards: layers may hold them in another layout. Of a model that ranks share, `config`,
    `weights` and `ops` are one rank's; `parameters` then counts those of all, each once.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: MutableMapping[str, torch.Tensor],
        ops: Operations,
        *,
        parameters: int | None = None,
        kv_scales: KVScales | None = None,
    ) -> None:
        self.config = config
        held = sum(weight.numel() for weight in weights.values())
        #: Of the whole model.
        self.parameters_count = held if parameters is None else parameters
        #: Bytes that this rank holds.
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        #: [layers, K] each, for keys and values of 8 bits; None: the checkpoint has none.
        self.kv_scales = kv_scales
        self._ops = ops
        self._embedding = weights["embedding"]
        self._head = linear(ops, weights, "embedding" if config.tied_head else "head")
        weights.pop("embedding", None)
        self._norm = weights.pop("norm")
        self._layers = [_layer(config, weights, ops, i) for i in range(config.layers)]
        self._inverse_frequencies = torch.tensor(
            config.rope.inverse_frequencies, device=self._embedding.device
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations, and keys and values."""
        return self._embedding.dtype

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """Run a step's tokens; write their keys and values to the pool.

        Returns [T, hidden] after the final norm, an inference tensor.
        """
        ops, config = self._ops, self.config
        plans = {window: ops.plan_attention(batch, window) for window in set(config.windows)}
        rotation = ops.rotate(
            batch.t_position, self._inverse_frequencies, config.rope.scale, self.dtype
        )
        residual = ops.embed(self._embedding, batch.t_token)
        for i, layer in enumerate(self._layers):
            keys, values, scales = pool.keys[i], pool.values[i], pool.scales[i]
            q = ops.store_key_value(
                layer.qkv(residual), rotation, layer.head_norm, keys, values, batch.t_slot, scales
            )
            attended = ops.attention(q, keys, values, plans[layer.window], scales=scales)
            layer.output(attended, residual)
            layer.feed_forward(residual)
        return ops.rms_norm(residual, self._norm, config.norm_epsilon)

    @property
    def windows(self) -> list[int | None]:
        """The different windows of the layers."""
        return sorted(set(self.config.windows), key=lambda window: window or 0)

    def tiles(self, rows: RaggedRows, most: int) -> npt.NDArray[np.int32] | None:
        """`ops.TileExtends` for each of `windows`, [windows, numbers]; None: `most` are too few."""
        assert self._ops.tile_extends is not None, "these operations are not captured"
        config = self.config
        shape = Heads(
            config.heads, config.kv_heads, config.head_dim, self.dtype, self._embedding.device
        )
        lists = [self._ops.tile_extends(rows, window, shape, most) for window in self.windows]
        packed = [tiles for tiles in lists if tiles is not None]
        return np.stack(packed) if len(packed) == len(lists) else None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [n, hidden] -> [n, vocabulary] in the model's dtype, an inference tensor."""
        # Ranks that share a vocabulary may have a few rows beyond its end.
        return self._head(hidden)[:, : self.config.vocab_size]


def _layer(
    config: DecoderConfig, weights: MutableMapping[str, torch.Tensor], ops: Operations, i: int
) -> Layer:
    head_norm = None
    if config.qk_norm:
        head_norm = HeadNorm(
            weights.pop(f"{i}.q_norm"), weights.pop(f"{i}.k_norm"), config.norm_epsilon
        )
    input_norm = RowNorm(weights.pop(f"{i}.input_norm"), config.norm_epsilon)
    return Layer(
        qkv=norm_linear(ops, weights, f"{i}.qkv", input_norm),
        head_norm=head_norm,
        window=config.windows[i],
        output=add_linear(ops, weights, f"{i}.output"),
        feed_forward=_feed_forward(config, weights, ops, i),
    )


def _feed_forward(
    config: DecoderConfig, weights: MutableMapping[str, torch.Tensor], ops: Operations, i: int
) -> AddBlock:
    norm = RowNorm(weights.pop(f"{i}.mlp_norm"), config.norm_epsilon)
    experts = config.experts
    if experts is None or i not in experts.layers:
        return gated_block(ops, weights, f"{i}.gate_up", f"{i}.down", norm, config.activation)
    return expert_block(ops, weights, f"{i}.experts", norm, config.activation, experts.routing)
