"""What the hardware allows: the bytes that a step must read, and its operations."""

from __future__ import annotations

import math

from tokenpod.models.families import FAMILIES
from tokenpod.models.layers.attention import Attention
from tokenpod.models.layers.gated_delta import GatedDeltaNet
from tokenpod.models.layers.latent import Latent
from tokenpod.models.layers.mixer import Mixer
from tokenpod.models.layers.short_convolution import ShortConvolution
from tokenpod.models.layers.state_space import StateSpace
from tokenpod.models.specs.layer_spec import Experts
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.specs.weight_table import weights_of

#: Measured on one H200: bytes per second of a plain read, bf16 operations per second.
BANDWIDTH, MATRIX_RATE = 4.617e12, 687e12
#: Bytes of a number of a weight, scales included; int4 has groups of 128.
NUMBER_BYTES = {"none": 2.0, "bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 2 / 128}
#: Operations per second of products in prompts, as a multiple of bf16's.
RATE = {"fp8": 2.0}


def multiplied(config: ModelSpec, rows: float) -> float:
    """Numbers of the layers' products that a step of so many rows reads.

    Of experts those that rows choose, evenly at random.
    """
    family = next(f for f in FAMILIES if config.architecture in f.architectures)
    numbers = 0.0
    for weight in weights_of(config, family.names_of(config)[0], ""):
        if len(weight.shape) < 2 or not weight.name[0].isdigit():
            continue
        layer = config.layers[int(weight.name.partition(".")[0])]
        share = 1.0
        if weight.experts:
            assert isinstance(layer.mlp, Experts)
            share = 1 - (1 - layer.mlp.routing.per_token / layer.mlp.count) ** rows
        numbers += math.prod(weight.shape) * share
    return numbers


def kv_bytes(config: ModelSpec, context: float, number: int = 2) -> float:
    """Of keys and values that one more token of a sequence reads, and of states that it changes."""
    states = sum(2 * layout.nbytes(number) for layout in config.state_layouts)
    return states + sum(
        number * cache.kv.numbers * min(context, cache.window or math.inf)
        for cache in (mixer.cache for mixer in config.mixers)
        if cache.kv is not None
    )


def decode_bytes(
    config: ModelSpec, rows: int, context: float, quantize: str = "none", *, head: bool = False
) -> float:
    """Bytes that a decode step must read: weights without the embedding, keys and values."""
    wide, narrow = 2.0, NUMBER_BYTES[quantize]
    weights = narrow * multiplied(config, max(rows, 1))
    weights += (narrow if head else wide) * config.vocab_size * config.hidden_size
    return weights + rows * kv_bytes(config, context)


def mixer_operations(mixer: Mixer, tokens: int) -> float:
    """Of queries with keys and weights with values, causal, within the window.

    Of states: they are read by a query, by a key of a delta net, and written, once for each token.
    """
    if isinstance(mixer, GatedDeltaNet | StateSpace):
        shape, times = mixer.shape, 3 if isinstance(mixer, GatedDeltaNet) else 2
        return 2.0 * times * tokens * shape.value_heads * shape.key_dim * shape.value_dim
    if isinstance(mixer, ShortConvolution):
        return 2.0 * tokens * mixer.channels * mixer.width
    reach = min(tokens, mixer.cache.window or tokens)
    pairs = reach * tokens - reach * reach / 2
    if isinstance(mixer, Latent):
        widths = mixer.nope_dim + mixer.rope_dim + mixer.value_dim
    else:
        assert isinstance(mixer, Attention)
        widths = 2 * mixer.head_dim
    return 2 * pairs * mixer.heads * widths


def prefill_operations(config: ModelSpec, tokens: int) -> float:
    """Multiplications and additions of a prompt: products, causal attention, no logits."""
    attention = sum(mixer_operations(mixer, tokens) for mixer in config.mixers)
    return 2 * multiplied(config, 1) * tokens + attention


def limit_seconds(config: ModelSpec, lengths: list[tuple[int, int]], rows: int) -> float:
    """Prefill at the matrix rate, then decode at the bandwidth in batches of up to `rows`."""
    prefill = sum(prefill_operations(config, prompt) for prompt, _ in lengths) / MATRIX_RATE
    kv = sum(kv_bytes(config, prompt + output / 2) * output for prompt, output in lengths)
    steps = max(max(output for _, output in lengths), sum(output for _, output in lengths) / rows)
    return prefill + (steps * decode_bytes(config, 0, 0) + kv) / BANDWIDTH
