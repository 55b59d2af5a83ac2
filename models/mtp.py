"""Layers that predict further tokens (MTP), which some checkpoints have behind their last one.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; those of GLM-4.5, Qwen3-Next,
Qwen3.5 and MiMo are built alike. A family says how they are named (`PredictingNames`).

    feature of a position   what the served model's head reads there, after the final norm
    an entry                a token, and the feature of the position before it
    layer                   as the model's last one with attention, on join(norm(embedding),
                            norm(feature))
    guess                   the served model's head, of the stream behind a norm of its own

The stream of an entry stands in for the feature of its position until the served model has computed
that, so one layer guesses as many tokens as are asked for. Embedding and head are the served
model's: copies of them that a checkpoint has in this layer are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokenpod.kernels.backends.registry import operations_for
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.checkpoints.checkpoint import Checkpoint, tensors_of
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.verify import verified
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.decoders.layer import make_layer
from tokenpod.models.decoders.step_plans import StepPlans
from tokenpod.models.folder import read_layout, read_text
from tokenpod.models.formats import as_stored
from tokenpod.models.layers.layer_tensors import LayerTensors, norm_weights
from tokenpod.models.layers.linear import Products, Weights
from tokenpod.models.layers.mixer import MixerParts
from tokenpod.models.layers.norms import make_norm
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.specs.head_spec import HeadSpec
from tokenpod.models.specs.layout import Layout
from tokenpod.models.weights.weights import Axis, Source, Weight


def mtp_layout(folder: Path, model: Layout) -> Layout:
    """The layer's spec and weights, beside those of a model. Raises ModelError if it has none."""
    spec, names = model.spec, model.names.predicting
    if names is None:
        raise ModelError(f"{spec.architecture} has no layers that predict further tokens")
    if not read_text(folder).fields.count(names.field, names.count):
        raise ModelError(
            f"{spec.architecture} has no layers that predict further tokens ({names.field} is 0)"
        )
    layer = next(
        layer
        for layer in reversed(spec.layers)
        if layer.mixer is not None and layer.mixer.cache.kv is not None
    )
    at, hidden = names.place(model.prefix, len(spec.layers)), Axis(spec.hidden_size)
    own = layer.weights(LayerTensors(spec.hidden_size, model.names, at + names.layer))
    weights = [replace(weight, name=f"0.{weight.name}") for weight in own]
    norms = (("embedding_norm", names.embedding_norm), ("feature_norm", names.feature_norm))
    for name, stored in (*norms, ("norm", names.norm)):
        weights += norm_weights(name, spec.norm, at + stored, hidden)
    both = Axis(2 * spec.hidden_size)
    weights.append(
        Weight("join", (Source(f"{at}{names.join}.weight", (hidden, both)),), multiplied=True)
    )
    return replace(
        model, spec=replace(spec, layers=(layer,)), weights=weights, scales=[], unused={}
    )


def load_mtp(
    folder: Path,
    served: Decoder,
    *,
    positions: int,
    device: torch.device,
    quantize: str | None = None,
    override: Mapping[str, Any] | None = None,
    require_manifest: bool = False,
) -> MtpHead:
    """The layer of the served model's own checkpoint, whole on every rank. Raises ModelError."""
    with (
        Checkpoint(folder) as checkpoint,
        verified(folder, checkpoint.files, required=require_manifest),
    ):
        model = read_layout(folder, checkpoint, positions, quantize, override=override)
        layout = mtp_layout(folder, model)
        for weight in layout.weights:
            for name, stored in tensors_of(weight, layout.reader).items():
                if name not in checkpoint:
                    raise ModelError(f"{folder}: the tensor {name} is missing")
                checkpoint.check(name, stored)
        ops = operations_for(device)
        weights = read_weights(
            checkpoint,
            layout.weights,
            dtype=served.dtype,
            device=device,
            progress=lambda done, total: None,
            reader=as_stored(model.spec, layout.reader, checkpoint, served.dtype, ops),
        )
    names = layout.names.predicting
    return MtpHead(
        HeadSpec(layout.spec),
        weights,
        ops,
        served,
        feature_first=names is not None and names.feature_first,
    )


class MtpHead:
    """Such a layer of a served model, whose embedding and head it shares.

    Args:
        spec: of the layer.
        weights: those of `mtp_layout`; empty afterwards.
        ops: of the device.
        served: the model that it guesses for.
        feature_first: the feature comes before the token where both are joined.
    """

    pool_class = KVPool
    #: It reads what the served model's head reads.
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        spec: HeadSpec,
        weights: Weights,
        ops: Operations,
        served: Decoder,
        *,
        feature_first: bool = False,
    ) -> None:
        self.config, self._feature_first = spec, feature_first
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        self._served, self._dtype = served, served.dtype
        products, decoder = Products(ops, weights), spec.decoder
        self._embedding_norm, self._feature_norm, self._norm = (
            make_norm(decoder.norm, products, name)
            for name in ("embedding_norm", "feature_norm", "norm")
        )
        self._join = products.linear("join")
        layer = decoder.layers[0]
        self._plans = StepPlans(layer.mixers, ops, self._dtype, served.device)
        rotation = self._plans.rotation(layer.mixers)
        parts = MixerParts(products, 0, cache=0, state=0, rotation=rotation)
        self._layer = make_layer(layer, parts)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, of what is kept of entries, and of features."""
        return self._dtype

    def features_of(self, hidden: torch.Tensor, streams: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] of positions: what the served model came to."""
        del streams
        return hidden

    @staticmethod
    def features(pool: KVPool) -> torch.Tensor:
        """[slots + 1, hidden]: of each slot's position."""
        return pool.keys[1][:, 0]

    @torch.inference_mode()
    def forward(
        self, t_token: torch.Tensor, t_before: torch.Tensor, batch: ForwardBatch, pool: KVPool
    ) -> torch.Tensor:
        """Compute entries; see `EagleHead.forward`."""
        step = self._plans.step(batch, pool)
        embedded = self._embedding_norm(self._served.embed_tokens(t_token))
        feature = self._feature_norm(self.features(pool).index_select(0, t_before))
        both = [feature, embedded] if self._feature_first else [embedded, feature]
        return self._layer(self._join(torch.cat(both, dim=1), None), step)

    @torch.inference_mode()
    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] of streams [n, hidden]."""
        return self._served.logits(self._norm(stream))

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens."""
        return self._plans.tiles(rows)
