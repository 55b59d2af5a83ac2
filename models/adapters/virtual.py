"""Virtual tokens before a prompt: what PEFT's prompt tuning, P-tuning and prefix tuning have made.

All three save one tensor, `prompt_embeddings`: of a prompt [tokens, width], which takes the place
of rows of the embedding's table; of a prefix [tokens, layers · 2 · heads · head_dim], the keys, as
they lie in the cache, and the values of each layer (huggingface/peft, `get_prompt` of
src/peft/peft_model.py, version 0.21).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from tokenpod.core.adapters import AdapterKind
from tokenpod.models.adapters.encoders import encoded
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.checkpoints.tensor_file import DTYPES, TensorFile
from tokenpod.models.layers.attention import Attention
from tokenpod.models.layers.rope import head_order
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division

#: Ways to train virtual tokens, by PEFT's names.
KINDS = {
    "PROMPT_TUNING": AdapterKind.PROMPT,
    "P_TUNING": AdapterKind.PROMPT,
    "PREFIX_TUNING": AdapterKind.PREFIX,
}

#: Fields that say nothing about what is computed from the saved tensors.
_NEUTRAL = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_type", "peft_version", "num_attention_heads", "num_layers", "token_dim"),
        *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path"),
        *("tokenizer_kwargs", "encoder_dropout", "encoder_hidden_size", "encoder_num_layers"),
        *("encoder_reparameterization_type", "prefix_projection", "init_weights"),
    }
)
_EMBEDDINGS = "prompt_embeddings"
#: What names of an encoder's tensors begin with in a state that was saved whole.
_ENCODER = re.compile(
    r"(?:base_model\.)?prompt_encoder\.(?:[^.]+\.)??(?=embedding|mlp_|lstm_|tran)"
)


@dataclass(frozen=True, slots=True)
class Virtual:
    """Virtual tokens on the host, for one rank."""

    kind: AdapterKind
    digest: str
    #: [tokens, width], or of a prefix [layers, 2, tokens, heads, head_dim] keys and values.
    numbers: torch.Tensor
    #: Of no module.
    largest_rank: int = 0

    @property
    def virtual_tokens(self) -> int:
        """How many there are."""
        return self.numbers.shape[0 if self.kind is AdapterKind.PROMPT else 2]

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.numbers.nbytes


@dataclass(frozen=True, slots=True)
class VirtualBase:
    """What virtual tokens must fit: the whole model, and which part a rank has."""

    spec: ModelSpec
    shard: Shard
    dtype: torch.dtype
    #: Of the longest sequence that is served.
    positions: int


def read_virtual(file: TensorFile, fields: Fields, base: VirtualBase) -> Virtual:
    """This rank's part of the virtual tokens in `file`, all but its digest.

    Raises ModelError, in one line, for what is not understood, for those of another base, and for
    more than a sequence can have.
    """
    kind = fields.choice("peft_type", KINDS)
    fields.only("num_transformer_submodules", 1)
    known = _NEUTRAL | {"num_virtual_tokens", "num_transformer_submodules"}
    for name, value in fields.values.items():
        if name not in known and value:
            raise ModelError(f"{fields.source}: {name} is {value!r:.80}, which is not supported")
    tokens = fields.integer("num_virtual_tokens")
    if tokens >= base.positions:
        raise ModelError(
            f"{fields.source}: num_virtual_tokens is {tokens}; sequences of this server have"
            f" {base.positions} positions in all (--max-total-tokens)"
        )
    width = base.spec.embedding_width
    if kind is AdapterKind.PREFIX:
        width = _prefix_width(base.spec, fields.source)
    numbers = _read(file, (tokens, width))
    if kind is AdapterKind.PREFIX:
        numbers = _cut(numbers, base)
    return Virtual(kind, "", numbers.to(base.dtype).contiguous())


def _read(file: TensorFile, shape: tuple[int, int]) -> torch.Tensor:
    """The saved embeddings in their own kind of numbers, or what a saved encoder makes, float32."""
    if _EMBEDDINGS in file.entries:
        others = sorted(file.entries.keys() - {_EMBEDDINGS})
        if others:
            raise ModelError(f"{file.name}: {others[0]} is not understood beside {_EMBEDDINGS}")
        found = file.entries[_EMBEDDINGS].shape
        made = None if found != shape else read_tensor(file, _EMBEDDINGS)
    else:
        names = {name: _ENCODER.sub("", name, count=1) for name in file.entries}
        foreign = next((name for name in sorted(names) if not _ENCODER.match(name)), None)
        if foreign is not None or not names:
            found_there = foreign or "no tensor"
            raise ModelError(f"{file.name}: there is no {_EMBEDDINGS}, but {found_there}")
        tensors = {own: read_tensor(file, name).float() for name, own in names.items()}
        made = encoded(tensors, file.name)
        found = tuple(made.shape)
    if made is None or found != shape:
        raise ModelError(
            f"{file.name}: {_EMBEDDINGS} is {list(found)}; of this base and num_virtual_tokens it"
            f" would be {list(shape)}"
        )
    if not made.isfinite().all():
        raise ModelError(f"{file.name}: {_EMBEDDINGS} has numbers that are not finite")
    return made


def read_tensor(file: TensorFile, name: str) -> torch.Tensor:
    """A whole tensor of floating point, as it is stored."""
    entry = file.entries[name]
    if entry.kind not in ("F32", "F16", "BF16"):
        raise ModelError(f"{file.name}: {name} holds {entry.kind} numbers")
    target = torch.empty(entry.shape, dtype=DTYPES[entry.kind])
    file.read(target, name, 0, entry.shape[1:])
    return target


def _prefix_width(spec: ModelSpec, source: str) -> int:
    """Numbers of one token, in all layers. Raises ModelError for a cache of another kind."""
    if spec.state_layouts:
        raise ModelError(
            f"{source}: layers of {spec.architecture} keep states, and prefix tuning has keys and"
            " values alone"
        )
    layouts = set(spec.kv_layouts)
    if any(layout.shared for layout in layouts):
        raise ModelError(
            f"{source}: {spec.architecture} caches latent rows: prefix tuning has keys and values"
            " of heads, which are not served with it"
        )
    uneven = any(layout.key_dim != layout.value_dim for layout in layouts)
    if uneven or len(layouts) > 1 or len(spec.storing) < len(spec.layers):
        raise ModelError(
            f"{source}: layers of {spec.architecture} have key/value heads of several shapes, or"
            " share them: prefix tuning has one shape, and all layers"
        )
    return sum(layout.numbers for layout in spec.kv_layouts)


def _cut(numbers: torch.Tensor, base: VirtualBase) -> torch.Tensor:
    """This rank's heads, keys in the order in which the model holds them."""
    spec, kv = base.spec, base.spec.kv_layouts[0]
    own = base.shard.part(Axis(kv.heads * kv.key_dim, Division.KEY, unit=kv.key_dim))
    heads = slice(own.start // kv.key_dim, own.stop // kv.key_dim)
    by_layer = numbers.view(len(numbers), len(spec.layers), 2, kv.heads, kv.key_dim)
    found = by_layer.permute(1, 2, 0, 3, 4)[:, :, :, heads].contiguous()
    for at, layer in enumerate(spec.layers):
        assert isinstance(layer.mixer, Attention), "prefixes of latent rows are refused"
        order = head_order(layer.mixer.positions, kv.key_dim)
        if order is not None:
            found[at, 0] = found[at, 0][..., list(order)]
    return found
