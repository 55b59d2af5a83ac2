"""What a model takes of a device's memory, whole and divided among ranks: counts, without torch."""

from __future__ import annotations

import msgspec

from tokenpod.core.adapters import scale_bytes
from tokenpod.core.messages import EngineOptions
from tokenpod.core.own_state import OwnState

#: Bytes of a number.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "int8": 1}
#: Of longer contexts keys and values are made of so many latents at a time.
LONGEST_EXPANDED = 1 << 14
#: Of so many tokens times heads keys and values are made of latents at a time: on a GPU, where
#: fewer heads would not fill it, and on a CPU.
#: "meta" has no memory, and stands for a GPU.
EXPANDED_AT_ONCE = {"cuda": 1 << 18, "meta": 1 << 18, "cpu": 1 << 16}


class Expansion(msgspec.Struct, frozen=True):
    """How long rows make keys and values of their latents, head by head."""

    #: Of one rank.
    heads: int
    #: Numbers that there are at a time for each head of a token, and for a token.
    head_numbers: int
    token_numbers: int

    def numbers(self, positions: int, device: str) -> int:
        """Numbers that there are at a time, at most, of rows of up to so many tokens."""
        tokens = min(positions, LONGEST_EXPANDED)
        pairs = min(tokens * self.heads, EXPANDED_AT_ONCE[device.partition(":")[0]])
        return pairs * self.head_numbers + tokens * self.token_numbers


class Portion(msgspec.Struct, frozen=True):
    """What the first of several ranks has of a model; no other has more."""

    #: Numbers in its weights.
    numbers: int
    #: For a token in all layers: its keys and values.
    kv_numbers: int
    #: Scales of them, if each head and token has some.
    kv_scales: int = 0
    #: Of the numbers, those in the layer that has most.
    kv_widest: int = 0
    #: Those of both in layers with a window.
    window_numbers: int = 0
    window_scales: int = 0
    #: How many of them are held in a format of fewer bits, and what those take.
    quantised_numbers: int = 0
    quantised_bytes: int = 0
    #: Of the others, those that a CPU like this one leaves in 16 bits where it computes in float32.
    narrow_numbers: int = 0
    #: Of a slot for adapters: for each unit of their rank, and whatever it is. None: takes none.
    adapter_numbers: tuple[int, int] | None = None
    #: Outputs that a slot may scale, and those of them that ranks sum.
    adapter_outputs: tuple[int, int] = (0, 0)
    #: Of an adapter's own embedding and head.
    copied_numbers: int = 0
    #: Of a slot for adapters' factors of embedding and head, for each unit of their rank.
    vocabulary_numbers: int = 0
    #: None: its layers keep keys and values.
    expansion: Expansion | None = None


class Footprint(msgspec.Struct, frozen=True):
    """What a model takes, whole and divided among tensor-parallel ranks."""

    architecture: str
    #: The checkpoint's own; None if it does not say.
    dtype: str | None
    #: Whether its tensors were looked at; else config.json alone was.
    from_tensors: bool
    hidden_size: int
    #: Features of a token between the products of a feed-forward block, over all its experts.
    intermediate_size: int
    vocab_size: int
    max_positions: int
    #: By the number of ranks: every one that can divide the model, 1 among them.
    portions: dict[int, Portion]
    #: The format that weights of products are made into.
    quantize: str = "none"
    #: Numbers of weights that are held twice: of a head that is the embedding in another format.
    repeated: int = 0
    #: Of a model that keeps sequences' states by itself: what they take, by the bytes of a number.
    states: dict[int, OwnState] = {}
    #: The longest of any layer; None: none has one.
    window: int | None = None
    #: Numbers of the tower of images, and those that it computes with; 0: it has none.
    tower_numbers: int = 0
    tower_working: int = 0

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return self.portions[1].numbers - self.repeated

    def weight_bytes(self, ranks: int, item_bytes: int, *, cpu: bool = False) -> int:
        """Bytes of one rank's weights: `item_bytes` for each dense number, on a CPU 2 for some."""
        portion = self.portions[ranks]
        dense = portion.numbers - portion.quantised_numbers
        narrow = portion.narrow_numbers if cpu and item_bytes == ITEM_BYTES["float32"] else 0
        size = (dense - narrow) * item_bytes + narrow * ITEM_BYTES["bfloat16"]
        return size + portion.quantised_bytes

    def adapter_bytes(self, ranks: int, slots: int, rank: int, item_bytes: int) -> int:
        """Bytes of one rank's slots for adapters of that rank, and of what scales outputs."""
        each, fixed = self.portions[ranks].adapter_numbers or (0, 0)
        scales = scale_bytes(*self.portions[ranks].adapter_outputs, slots)
        return slots * (each * rank + fixed) * item_bytes + scales

    def slot_bytes(self, ranks: int, kv_dtype: str) -> int:
        """Bytes of one token in all layers of one rank: keys and values, and what else is kept."""
        own = self.states.get(ITEM_BYTES[kv_dtype])
        portion = self.portions[ranks]
        numbers = portion.kv_numbers * ITEM_BYTES[kv_dtype]
        if own is not None:
            return own.slot_bytes + numbers
        return numbers + _scale_bytes(portion.kv_scales, kv_dtype)

    def window_bytes(self, ranks: int, kv_dtype: str) -> int:
        """Of these, the bytes in layers with a window."""
        portion = self.portions[ranks]
        numbers = portion.window_numbers * ITEM_BYTES[kv_dtype]
        return numbers + _scale_bytes(portion.window_scales, kv_dtype)


def _scale_bytes(scales: int, kv_dtype: str) -> int:
    return scales * ITEM_BYTES["float32"] if kv_dtype == "int8" else 0


def dtype_of(model: Footprint, options: EngineOptions) -> str:
    """The dtype of weights and activations."""
    return options.dtype or model.dtype or "float32"


def positions_of(model: Footprint, options: EngineOptions) -> int:
    """Longest sequence, in tokens."""
    return min(options.max_total_tokens or model.max_positions, model.max_positions)
