"""Layers that predict further tokens (MTP), which some checkpoints have behind their last one.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; GLM-4.5's are built alike.

    feature of a position   what the served model's head reads there, after the final norm
    an entry                a token, and the feature of the position before it
    layer                   as the model's last one, on eh_proj(enorm(embedding), hnorm(feature))
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
from tokenpod.models.layers.linear import Products, Weights
from tokenpod.models.layers.mixer import MixerParts
from tokenpod.models.layers.norms import Norm, make_norm
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.specs.head_spec import HeadSpec
from tokenpod.models.specs.layout import Layout
from tokenpod.models.weights.weights import Axis, Source, Weight

#: What says in config.json how many there are.
FIELD = "num_nextn_predict_layers"
#: Our name of each weight that other layers have not, its tensor, and how often it is as wide.
_OWN = (("enorm", "enorm", 0), ("hnorm", "hnorm", 0), ("join", "eh_proj", 2))
_OWN_NORM = "shared_head.norm"


def mtp_layout(folder: Path, model: Layout) -> Layout:
    """The layer's spec and weights, beside those of a model. Raises ModelError if it has none."""
    spec, last = model.spec, len(model.spec.layers) - 1
    if not read_text(folder).fields.count(FIELD, 0):
        raise ModelError(
            f"{spec.architecture} has no layers that predict further tokens ({FIELD} is 0)"
        )
    own = [x for x in model.weights if x.name.startswith(f"{last}.")]
    there = f"layers.{last}."
    at = next(name for weight in own for name in weight.tensors if there in name)
    prefix = at[: at.index(there)] + f"layers.{last + 1}."
    width = spec.hidden_size

    def weight(name: str, stored: str, times: int) -> Weight:
        axes = (Axis(width), Axis(times * width)) if times else (Axis(width),)
        source = Source(f"{prefix}{stored}.weight", axes)
        return Weight(name, (source,), multiplied=times > 0)

    weights = [_moved(x, last) for x in own]
    weights += [weight(*each) for each in _OWN] + [weight("norm", _OWN_NORM, 0)]
    return replace(
        model, spec=replace(spec, layers=spec.layers[-1:]), weights=weights, scales=[], unused={}
    )


def _moved(weight: Weight, last: int) -> Weight:
    """The weight of the layer behind the last one, by the names of a model of one layer."""

    def there(name: str) -> str:
        return name.replace(f"layers.{last}.", f"layers.{last + 1}.", 1)

    sources = tuple(
        replace(source, name=there(source.name), scales=source.scales and there(source.scales))
        for source in weight.sources
    )
    name = weight.name.removeprefix(f"{last}.")
    return replace(weight, name=f"0.{name}", sources=sources)


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
        weights = read_weights(
            checkpoint,
            layout.weights,
            dtype=served.dtype,
            device=device,
            progress=lambda done, total: None,
            reader=layout.reader,
        )
    return MtpHead(HeadSpec(layout.spec), weights, operations_for(device), served)


class MtpHead:
    """Such a layer of a served model, whose embedding and head it shares.

    Args:
        spec: of the layer.
        weights: those of `mtp_layout`; empty afterwards.
        ops: of the device.
        served: the model that it guesses for.
    """

    pool_class = KVPool
    #: It reads what the served model's head reads.
    taps: tuple[int, ...] = ()

    def __init__(self, spec: HeadSpec, weights: Weights, ops: Operations, served: Decoder) -> None:
        self.config = spec
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        self._served, self._dtype = served, served.dtype
        products, decoder = Products(ops, weights), spec.decoder
        assert decoder.norm is not None
        norm = Norm("rms", decoder.norm.epsilon)
        self._token_norm, self._feature_norm, self._norm = (
            make_norm(norm, products, name) for name in ("enorm", "hnorm", "norm")
        )
        self._join = products.linear("join")
        layer = decoder.layers[0]
        self._plans = StepPlans([layer.mixer], ops, self._dtype, served.device)
        rotation = self._plans.rotation(layer.mixer)
        self._layer = make_layer(layer, MixerParts(products, 0, cache=0, rotation=rotation))

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
        embedded = self._token_norm(self._served.embed_tokens(t_token))
        feature = self._feature_norm(self.features(pool).index_select(0, t_before))
        return self._layer(self._join(torch.cat([embedded, feature], dim=1), None), step)

    @torch.inference_mode()
    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] of streams [n, hidden]."""
        return self._served.logits(self._norm(stream))

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens."""
        return self._plans.tiles(rows)
