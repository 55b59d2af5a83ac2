"""Medusa heads: each guesses one further token, all of them from the same hidden state.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
2024. The files are those that its authors publish, which TGI reads too, and those of vLLM.

    hidden of position p    what the served model's head reads there: it says the token at p + 1
    head i                  blocks x + silu(linear(x)), and a product over the vocabulary: its own,
                            one for all heads, or the served model's; it says the token at p + 2 + i

    tensors     the authors', TGI's         vLLM's
    blocks      {i}.{j}.linear.weight       blocks.{i}.layers.{j}.weight; biases likewise
    products    {i}.{blocks}.weight         lm_heads.{i}.weight, or lm_head.weight for all
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import silu

from tokenpod.kernels.backends.registry import operations_for
from tokenpod.kernels.cache.kv_pool import KVLayout, KVPool
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.checkpoints.checkpoint import SINGLE, Checkpoint, check
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields, read_fields
from tokenpod.models.checkpoints.verify import verified
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.folder import HEADS, HEADS_WITHIN
from tokenpod.models.layers.linear import Product, Products, Weights
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.weights.weights import Axis, Source, Weight

#: How the authors' and TGI's files are called; others have the usual names.
FILE = "medusa_lm_head.safetensors"
#: What names begin with: of heads alone, and of heads within a whole model's checkpoint.
_PREFIXES = ("", HEADS_WITHIN, "medusa_heads.")
#: The tensor that says which tokens are guessed.
_MAP = "token_map"
#: Heads, and blocks of each, that a file may have.
_MOST = 64
#: They read one position, whichever it is.
MOST_POSITIONS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class _Names:
    """How a project calls the tensors of a block, and those of products over the vocabulary."""

    block: str
    product: str
    #: The same for all heads, if config.json says that there is one.
    shared: tuple[str, ...] = ()


_LAYOUTS = (
    _Names("{i}.{j}.linear", "{i}.{blocks}.weight"),
    _Names("blocks.{i}.layers.{j}", "lm_heads.{i}.weight", ("lm_head.weight", "lm_heads.0.weight")),
)


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """Heads in a folder, by config.json and the names and shapes of their tensors."""

    heads: int
    #: Of each head.
    blocks: int
    #: Of hidden states.
    width: int
    #: Tokens that products guess; None: the served model's head is used.
    guesses: int | None
    #: Tokens of the served model; None: config.json does not say.
    tokens: int | None
    #: The tensor of so many guesses that names their tokens; None: guess i is token i.
    token_map: str | None
    #: What guesses' scores are multiplied with; None: what the served model's are.
    scale: float | None
    #: "{i}.{j}" of blocks, "{i}.head" or, of all heads, "head".
    weights: tuple[Weight, ...]

    architecture = "Medusa"

    @property
    def vocab_size(self) -> int:
        """Of the served model, as far as the files say; else 0."""
        return self.tokens or (self.guesses if self.token_map is None else None) or 0

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """Nothing is kept of a token."""
        return ()

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Nothing is kept."""
        return ()

    def first(self, heads: int) -> list[Weight]:
        """The weights of the first heads. Raises ModelError if there are fewer."""
        if heads > self.heads:
            raise ModelError(
                f"it has {self.heads} heads, which guess a token each, and --speculate is {heads}"
            )
        used = {*map(str, range(heads)), "head"}
        return [x for x in self.weights if x.name.removesuffix("_bias").partition(".")[0] in used]


def is_medusa(folder: Path) -> bool:
    """Whether a folder's config.json is that of Medusa heads. Raises ModelError without one."""
    fields = read_fields(folder / "config.json")
    named = fields.values.get("architectures") == ["MedusaModel"]
    return HEADS in fields or named or fields.values.get("model_type") == "medusa"


def open_medusa(folder: Path) -> Checkpoint:
    """The files of heads. Raises ModelError if there are none that are read."""
    return Checkpoint(folder, FILE if (folder / FILE).is_file() else SINGLE)


def read_medusa(folder: Path, checkpoint: Checkpoint) -> MedusaSpec:
    """The heads in a folder. Raises ModelError for a layout or a tensor that is not known."""
    fields = read_fields(folder / "config.json")
    # vLLM's names, unless the file has the authors': that of a whole model has both.
    heads = fields.integer(_first(fields, HEADS, "num_heads"), most=_MOST)
    blocks = fields.integer(_first(fields, "medusa_num_layers", "num_hidden_layers"), most=_MOST)
    prefix, names = _layout(folder, checkpoint)
    width = max(checkpoint.shape(f"{prefix}{names.block.format(i=0, j=0)}.weight"), default=1)
    table = []
    for i in range(heads):
        for j in range(blocks):
            block = prefix + names.block.format(i=i, j=j)
            table.append(_weight(f"{i}.{j}", f"{block}.weight", width, width))
            if f"{prefix}{names.block.format(i=0, j=0)}.bias" in checkpoint:
                table.append(_weight(f"{i}.{j}_bias", f"{block}.bias", width))
    products = [prefix + names.product.format(i=i, blocks=blocks) for i in range(heads)]
    unread: list[str] = []
    if names.shared and fields.flag("original_lm_head", False):
        unread = [*products, *(prefix + name for name in names.shared)]
        products = [name for name in (prefix + x for x in names.shared) if name in checkpoint][:1]
    there = [name for name in products if name in checkpoint]
    products = products if there else []
    guesses = max(checkpoint.shape(there[0])[:1], default=0) if there else None
    for i, name in enumerate(products):
        own = "head" if len(products) < heads else f"{i}.head"
        table.append(_weight(own, name, guesses or 0, width))
    token_map = f"{prefix}{_MAP}" if f"{prefix}{_MAP}" in checkpoint else None
    beside = [name for name in checkpoint.names if prefix and not name.startswith(prefix)]
    optional = {*beside, *unread, *([token_map] if token_map else [])}
    check(checkpoint, table, MedusaSpec.architecture, optional=optional)
    scale = fields.real("logit_scale") if "logit_scale" in fields else None
    tokens = fields.optional_integer("vocab_size", None)
    return MedusaSpec(heads, blocks, width, guesses, tokens, token_map, scale, tuple(table))


def _first(fields: Fields, *names: str) -> str:
    """The first that is there; where none is, the error names the first."""
    return next((name for name in names if name in fields), names[0])


def _weight(name: str, stored: str, *shape: int) -> Weight:
    return Weight(name, (Source(stored, tuple(map(Axis, shape))),), multiplied=len(shape) > 1)


def _layout(folder: Path, checkpoint: Checkpoint) -> tuple[str, _Names]:
    """What names begin with, and how they go on."""
    for prefix in _PREFIXES:
        for names in _LAYOUTS:
            if f"{prefix}{names.block.format(i=0, j=0)}.weight" in checkpoint:
                return prefix, names
    known = " or ".join(f"{names.block.format(i=0, j=0)}.weight" for names in _LAYOUTS)
    some = ", ".join(sorted(checkpoint.names)[:3]) or "none"
    raise ModelError(
        f"{folder}: its tensors ({some}) are in no layout of Medusa heads that is read: there is no"
        f" {known}"
    )


def load_medusa(
    folder: Path,
    served: Decoder,
    *,
    heads: int,
    device: torch.device,
    require_manifest: bool = False,
) -> MedusaHeads:
    """The first heads in a folder, in the served model's type. Raises ModelError."""
    with (
        open_medusa(folder) as checkpoint,
        verified(folder, checkpoint.files, required=require_manifest),
    ):
        spec = read_medusa(folder, checkpoint)
        config = served.config
        if spec.width != config.hidden_size:
            raise ModelError(
                f"it reads {spec.width} features, and the served model has {config.hidden_size}"
            )
        tokens = spec.vocab_size or config.vocab_size
        if tokens != config.vocab_size:
            raise ModelError(
                f"its vocabulary has {tokens} tokens, and that of the served model"
                f" {config.vocab_size}"
            )
        weights = read_weights(
            checkpoint,
            spec.first(heads),
            dtype=served.dtype,
            device=device,
            progress=lambda done, total: None,
        )
        guesses = _guesses(checkpoint, spec, config.vocab_size)
    return MedusaHeads(spec, heads, weights, operations_for(device), served, guesses)


def _guesses(checkpoint: Checkpoint, spec: MedusaSpec, tokens: int) -> torch.Tensor | None:
    """[m] int64: the served model's token of each guess; None: guess i is token i."""
    if spec.guesses is None or spec.token_map is None:
        return None
    name = spec.token_map
    stored = checkpoint.read(name)
    if stored.dim() != 1 or stored.dtype.is_floating_point or len(stored) not in range(1, tokens):
        raise ModelError(
            f"tensor {name} has shape {list(stored.shape)} of {stored.dtype}; expected fewer whole"
            f" numbers than the {tokens} tokens that there are"
        )
    if spec.guesses not in (len(stored), tokens):
        raise ModelError(f"tensor {name} names {len(stored)} tokens, and {spec.guesses} are scored")
    if int(stored.min()) < 0 or int(stored.max()) >= tokens:
        raise ModelError(f"tensor {name} names tokens beyond the {tokens} that there are")
    return stored.long()


class MedusaHeads:
    """Heads of a served model; see `engine.drafts.parallel_draft`.

    Args:
        spec: of the folder.
        heads: how many there are.
        weights: those of `MedusaSpec.first`; empty afterwards.
        ops: of the device.
        served: the model that they guess for.
        guesses: [m] int64: the served model's token of each guess; None: guess i is token i.
    """

    pool_class = KVPool

    def __init__(
        self,
        spec: MedusaSpec,
        heads: int,
        weights: Weights,
        ops: Operations,
        served: Decoder,
        guesses: torch.Tensor | None = None,
    ) -> None:
        self.config, self.heads = spec, heads
        self._served, self._guesses = served, None
        if guesses is not None:
            self._guesses = guesses.to(served.device)
            for name, weight in weights.items():
                assert isinstance(weight, torch.Tensor)
                if name.endswith("head") and len(weight) > len(guesses):
                    weights[name] = weight.index_select(0, self._guesses)
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        products = Products(ops, weights)
        self._shared = products.linear("head") if "head" in weights else None
        self._own = [products.linear(f"{i}.head") for i in range(heads) if f"{i}.head" in weights]
        self._blocks = [
            [products.linear(f"{i}.{j}") for j in range(spec.blocks)] for i in range(heads)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self._served.dtype

    @property
    def width(self) -> int:
        """Of hidden states."""
        return self.config.width

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, heads: int) -> torch.Tensor:
        """[heads * n, vocabulary] of hidden states [n, hidden], head after head.

        -inf for tokens that are not guessed.
        """
        streams = [self._stream(blocks, hidden) for blocks in self._blocks[:heads]]
        if self._own:
            own = zip(self._own, streams, strict=False)
            return self._scored(torch.cat([product(x, None) for product, x in own]))
        stream = torch.cat(streams)
        if self._shared is not None:
            return self._scored(self._shared(stream, None))
        return self._served.logits(stream)

    @staticmethod
    def _stream(blocks: list[Product], x: torch.Tensor) -> torch.Tensor:
        for linear in blocks:
            x = x + silu(linear(x, None))
        return x

    def _scored(self, logits: torch.Tensor) -> torch.Tensor:
        """As the served model's are: its temperature, whole vocabulary."""
        head = self._served.config.head
        scale = head.scale if self.config.scale is None else self.config.scale
        if not math.isclose(scale, 1.0):
            logits = logits * scale
        if head.softcap is not None:
            logits = (logits / head.softcap).tanh_().mul_(head.softcap)
        if self._guesses is None:
            return logits
        shape = len(logits), self._served.config.vocab_size
        return logits.new_full(shape, -torch.inf).index_copy_(1, self._guesses, logits)
