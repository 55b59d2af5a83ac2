"""EAGLE-3 heads: one layer that guesses on from what the served model has seen of a text.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", 2025; the files are those that its authors publish, which vLLM and SGLang read too.

    feature of a position   fc(the streams before layers 2, L / 2 and L - 3 of the served model)
    an entry                a token, and the feature of the position before it
    layer                   attention over norm(embedding) and norm(feature), side by side; what it
                            finds is added to the feature, as the feed-forward block's result is
    guess                   lm_head(norm(stream)), over the most frequent tokens alone (`d2t`)

The stream of an entry stands in for the feature of its position until the served model has computed
that. A text's first token has no feature before it, and no entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tokenpod.kernels.backends.registry import operations_for
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.checkpoints.verify import verified
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.decoders.layer import mixer_branch, mlp_branch
from tokenpod.models.decoders.step_plans import StepPlans
from tokenpod.models.families.family import gated_decoder
from tokenpod.models.layers.attention import Attention
from tokenpod.models.layers.linear import Products, Weights
from tokenpod.models.layers.mixer import MixerParts
from tokenpod.models.layers.norms import Norm, make_norm
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.specs.head_spec import HeadSpec
from tokenpod.models.specs.layer_spec import Mlp
from tokenpod.models.weights.weights import Axis, Source, Weight

#: What tells such a folder from other models': the length of `d2t`.
FIELD = "draft_vocab_size"
#: Of the served model's layers, those before which its stream is read.
_FUSED = 3
#: How files of different projects call the layer.
_LAYERS = ("midlayer.", "layers.0.", "model.layers.0.")


@dataclass(frozen=True)
class EagleSpec(HeadSpec):
    """A head, by its config.json."""

    #: Tokens that it can guess.
    guesses: int
    #: Features of the served model's stream.
    served_width: int


def is_eagle(folder: Path) -> bool:
    """Whether a folder has such a head. Raises ModelError without a config.json."""
    return FIELD in read_fields(folder / "config.json")


def read_eagle(folder: Path, served: int | None = None) -> EagleSpec:
    """What config.json says; `served`: tokens of the longest sequence. Raises ModelError."""
    fields = read_fields(folder / "config.json")
    fields.only("num_hidden_layers", 1)
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    spec = gated_decoder(fields, served)
    width = fields.integer("target_hidden_size", spec.hidden_size)
    return EagleSpec(spec, fields.integer(FIELD), width)


def weights_of(spec: EagleSpec, layer: str) -> list[Weight]:
    """What a head is made of; `layer`: what the names of its layer's tensors begin with."""
    decoder, attention, mlp = spec.decoder, _attention(spec), _mlp(spec)
    width, heads = decoder.hidden_size, attention.heads * attention.head_dim
    keys, inner = attention.kv_heads * attention.head_dim, mlp.width

    def weight(name: str, *sources: tuple[str, tuple[int, ...]]) -> Weight:
        return Weight(
            name,
            tuple(
                Source(f"{stored}.weight", tuple(Axis(length) for length in shape))
                for stored, shape in sources
            ),
        )

    return [
        weight("fc", ("fc", (width, _FUSED * spec.served_width))),
        weight("0.token_in", (f"{layer}input_layernorm", (width,))),
        weight("0.feature_in", (f"{layer}hidden_norm", (width,))),
        weight(
            "0.qkv",
            (f"{layer}self_attn.q_proj", (heads, 2 * width)),
            (f"{layer}self_attn.k_proj", (keys, 2 * width)),
            (f"{layer}self_attn.v_proj", (keys, 2 * width)),
        ),
        weight("0.output", (f"{layer}self_attn.o_proj", (width, heads))),
        weight("0.mlp_in", (f"{layer}post_attention_layernorm", (width,))),
        weight(
            "0.up",
            (f"{layer}mlp.gate_proj", (inner, width)),
            (f"{layer}mlp.up_proj", (inner, width)),
        ),
        weight("0.down", (f"{layer}mlp.down_proj", (width, inner))),
        weight("norm", ("norm", (width,))),
        weight("head", ("lm_head", (spec.guesses, width))),
    ]


def load_eagle(
    folder: Path,
    served: Decoder,
    *,
    positions: int,
    device: torch.device,
    require_manifest: bool = False,
) -> EagleHead:
    """The head in a folder, in the served model's type. Raises ModelError."""
    spec = read_eagle(folder, positions)
    if len(served.config.layers) < _FUSED:
        raise ModelError(f"it reads {_FUSED} layers, and the served model has fewer")
    if spec.vocab_size != served.config.vocab_size:
        raise ModelError(
            f"its vocabulary has {spec.vocab_size} tokens, and that of the served model"
            f" {served.config.vocab_size}"
        )
    if spec.served_width != served.config.hidden_size:
        raise ModelError(
            f"it reads {spec.served_width} features, and the served model's stream has"
            f" {served.config.hidden_size}"
        )
    with (
        Checkpoint(folder) as checkpoint,
        verified(folder, checkpoint.files, required=require_manifest),
    ):
        layer = next((x for x in _LAYERS if f"{x}hidden_norm.weight" in checkpoint), _LAYERS[0])
        table = weights_of(spec, layer)
        own = "embed_tokens.weight"
        if own in checkpoint:
            shape = (spec.vocab_size, spec.decoder.hidden_size)
            table.append(Weight("embedding", (Source(own, tuple(map(Axis, shape))),)))
        for weight in table:
            for name, stored in ((n, s) for x in weight.sources for n, s in x.tensors.items()):
                if name not in checkpoint:
                    raise ModelError(f"{folder}: the tensor {name} is missing")
                checkpoint.check(name, stored)
        weights = read_weights(
            checkpoint,
            table,
            dtype=served.dtype,
            device=device,
            progress=lambda done, total: None,
        )
        guesses = _guesses(checkpoint, spec)
    return EagleHead(spec, weights, operations_for(device), served, guesses)


def _guesses(checkpoint: Checkpoint, spec: EagleSpec) -> torch.Tensor:
    """[guesses] int64: the served model's token of each guess. `d2t` has the differences."""
    if "d2t" not in checkpoint:
        if spec.guesses == spec.vocab_size:
            return torch.arange(spec.guesses)
        raise ModelError("the tensor d2t is missing")
    stored = checkpoint.read("d2t")
    if stored.shape != (spec.guesses,) or stored.dtype.is_floating_point:
        raise ModelError(
            f"tensor d2t has shape {list(stored.shape)} of {stored.dtype}; config.json says"
            f" [{spec.guesses}] whole numbers"
        )
    tokens = torch.arange(spec.guesses) + stored.long()
    if int(tokens.min()) < 0 or int(tokens.max()) >= spec.vocab_size:
        raise ModelError(f"tensor d2t names tokens beyond the {spec.vocab_size} that there are")
    return tokens


class EagleHead:
    """A head of a served model, whose embedding it shares unless it has its own.

    Args:
        spec: as config.json has it.
        weights: those of `weights_of`, and perhaps `embedding`; empty afterwards.
        ops: of the device.
        served: the model that it guesses for.
        guesses: [guesses] int64: the served model's token of each.
    """

    pool_class = KVPool

    def __init__(
        self,
        spec: EagleSpec,
        weights: Weights,
        ops: Operations,
        served: Decoder,
        guesses: torch.Tensor,
    ) -> None:
        self.config = spec
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        self._ops, self._served, self._dtype = ops, served, served.dtype
        self._device = served.device
        table = weights.pop("embedding", None)
        assert table is None or isinstance(table, torch.Tensor)
        self._table = table
        products = Products(ops, weights)
        decoder, attention = spec.decoder, _attention(spec)
        norm = Norm("rms", _epsilon(spec))
        self._token_norm = make_norm(norm, products, "0.token_in")
        self._feature_norm = make_norm(norm, products, "0.feature_in")
        self._plans = StepPlans([attention], ops, self._dtype, self._device)
        parts = MixerParts(
            products, 0, cache=0, state=0, rotation=self._plans.rotation((attention,))
        )
        self._attention = mixer_branch(attention.make(parts, None), parts)
        self._mlp = mlp_branch(_mlp(spec), parts, norm)
        self._norm = make_norm(decoder.norm, products, "norm")
        self._fuse, self._head = products.linear("fc"), products.linear("head")
        self._guesses = None
        if spec.guesses < spec.vocab_size:
            self._guesses = guesses.to(self._device)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of keys, values and features."""
        return self._dtype

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the served model before which its stream is read."""
        layers = len(self._served.config.layers)
        return 2, layers // 2, layers - 3

    def features_of(self, hidden: torch.Tensor, streams: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] of positions, of the served model's streams before `taps`."""
        del hidden
        return self.fuse(torch.cat(streams, dim=1))

    def fuse(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, hidden] features, of the served model's streams [T, 3 * its hidden]."""
        return self._fuse(streams, None)

    @staticmethod
    def features(pool: KVPool) -> torch.Tensor:
        """[slots + 1, hidden]: of each slot's position."""
        return pool.keys[1][:, 0]

    @torch.inference_mode()
    def forward(
        self, t_token: torch.Tensor, t_before: torch.Tensor, batch: ForwardBatch, pool: KVPool
    ) -> torch.Tensor:
        """Compute entries, and write their keys and values.

        Args:
            t_token: [T] int64.
            t_before: [T] int64: the slot of the position before each.
            batch: of the same tokens; contexts, runs and the row table without the first position.
            pool: of the head.

        Returns [T, hidden] streams.
        """
        step = self._plans.step(batch, pool)
        if self._table is None:
            embedded = self._served.embed_tokens(t_token)
        else:
            embedded = self._ops.embed(self._table, t_token)
        x = self.features(pool).index_select(0, t_before)
        both = torch.cat([self._token_norm(embedded), self._feature_norm(x)], dim=1)
        self._attention.write(self._attention.read(both, step), x, step)
        self._mlp.write(self._mlp.read(x, step), x, step)
        return x

    @torch.inference_mode()
    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] of streams [n, hidden]: -inf for tokens that it can't guess."""
        guessed = self._head(self._norm(stream), None)
        if self._guesses is None:
            return guessed
        shape = len(stream), self.config.vocab_size
        return guessed.new_full(shape, -torch.inf).index_copy_(1, self._guesses, guessed)

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens."""
        return self._plans.tiles(rows)


def _attention(spec: EagleSpec) -> Attention:
    attention = spec.decoder.layers[0].mixer
    assert isinstance(attention, Attention)
    return attention


def _mlp(spec: EagleSpec) -> Mlp:
    mlp = spec.decoder.layers[0].mlp
    assert isinstance(mlp, Mlp)
    return mlp


def _epsilon(spec: EagleSpec) -> float:
    assert spec.decoder.norm is not None
    return spec.decoder.norm.epsilon
