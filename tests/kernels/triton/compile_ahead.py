"""Compile, without a GPU, what serving launches: `python compile_ahead.py MAJOR MINOR [FAMILY...]`.

Kernels are launched as always, on tensors in the host's memory, but a launch is compiled for a GPU
of that compute capability instead of run. What the interpreter takes and the compiler does not
shows here. Without a FAMILY all are compiled but `RARER`, for which "rarer" stands. Prints the name
of each kernel that compiled, and fails at the first that does not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from support.kernels.attention_steps import Spec, lay_out
from support.kernels.delta_steps import drawn_inputs, drawn_states, drawn_weights, with_ring
from support.kernels.space_steps import (
    NORMS,
    convolution_inputs,
    convolution_states,
    drawn_convolution,
    drawn_space,
    space_inputs,
)
from tokenpod.engine.gpu.device_sampler import DeviceSampler, Launches
from tokenpod.kernels.adapters import triton_adapters as adapters
from tokenpod.kernels.attention import attention_extend
from tokenpod.kernels.attention import triton_texts as texts
from tokenpod.kernels.backends.triton import OPERATIONS
from tokenpod.kernels.cache import slot_copies as slots
from tokenpod.kernels.cache import triton_rotary as rotary
from tokenpod.kernels.experts import triton_experts as experts
from tokenpod.kernels.gpu import launch, peers, steps
from tokenpod.kernels.operations.adapter_ops import AdapterWeights, Added, DenseWeight
from tokenpod.kernels.operations.attention_ops import (
    AttentionOptions,
    KVScales,
    LatentShape,
    TextOptions,
)
from tokenpod.kernels.operations.expert_ops import ExpertWeights, Routing, Score
from tokenpod.kernels.operations.pointwise_ops import Activation, HeadNorm, RowNorm
from tokenpod.kernels.operations.recurrent_ops import MemoryShape
from tokenpod.kernels.operations.weight import StackedWeight
from tokenpod.kernels.pointwise import triton_pointwise as pointwise
from tokenpod.kernels.products import triton_product as product
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Number, Rounding
from tokenpod.kernels.products.product_tiles import Kind, deterministic, measured
from tokenpod.kernels.products.quantised import format_products as quantised
from tokenpod.kernels.products.quantised import (
    lane_products,
    quantised_tiles,
    token_product,
)
from tokenpod.kernels.products.quantised import products as quantised_products
from tokenpod.kernels.sampling import offers
from tokenpod.models.weights import mxfp4

#: The package has a function of this name.
attention = import_module("tokenpod.kernels.attention.triton_attention")

CPU = torch.device("cpu")
BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 2, 128, 512


def compile_launches(capability: tuple[int, int]) -> None:
    """From now on every launch compiles for `capability`, once for each specialisation."""
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    backend = make_backend(target)
    done: set[str] = set()

    def run(self: JITFunction, *args: object, grid: object, warmup: bool, **named: object) -> None:
        del grid, warmup
        named |= {"debug": False, "instrumentation_mode": ""}
        bind = create_function_from_signature(self.signature, self.params, backend)
        bound, specialisation, options = bind(*args, **named)
        key = f"{self.fn.__module__}.{self.fn.__name__} {specialisation} {options}"
        if key in done:
            return
        done.add(key)
        options, signature, constants, attributes = self._pack_args(
            backend, named, bound, specialisation, options
        )
        source = ASTSource(self, signature, constants, attributes)
        try:
            made = compile_kernel(source, target=target, options=options.__dict__)
            held = launch.SHARED_BYTES.get(capability)
            assert held is None or made.metadata.shared <= held, f"{made.metadata.shared} bytes"
        except Exception:
            print(f"{key} does not compile", file=sys.stderr)
            raise
        print(self.fn.__name__, flush=True)

    JITFunction.run = run
    choosing = (
        adapters,
        launch,
        product,
        experts,
        quantised_products,
        lane_products,
        token_product,
        texts,
    )
    for module in choosing:
        module.capability = lambda device: capability
    attention.INTERPRETED = launch.Gpu(capability, processors=132)
    attention_extend._can_describe = lambda pool: (
        capability >= (9, 0) and pool.shape[2].bit_count() == 1
    )


def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attend(scaled: bool, options: AttentionOptions, window: int | None) -> None:
    """A row in splits, and rows of several tokens in one run and in several; many whole rows."""
    scales = KVScales(*torch.ones(2, KV_HEADS)) if scaled else None
    for specs in (
        [Spec(1, 40), Spec(9, 40), Spec(9, 50, piece=4)],
        [Spec(1, 40)] * 160,
    ):
        step = lay_out(specs, CPU)
        pools = draw(2, step.slots, KV_HEADS, HEAD_DIM)
        pools = pools.to(torch.float8_e4m3fn) if scaled else pools
        q = draw(step.batch.tokens, HEADS, HEAD_DIM)
        plan = attention.plan_attention(step.batch, window)
        attention.attention(q, pools[0], pools[1], plan, options, scales)


def attend_plainly() -> None:
    attend(False, AttentionOptions(), None)


def attend_with_everything() -> None:
    options = AttentionOptions(0.1, 2.0, torch.ones(HEADS), sinks=torch.ones(HEADS))
    attend(False, options, 100)


def attend_whole_texts() -> None:
    """Of encoders: all of a text, or what is near, with numbers by distance or without."""
    table = torch.ones(HEADS, 9)
    step = lay_out([Spec(40, 40), Spec(50, 50)], CPU)
    for options in (TextOptions(distance_bias=table), TextOptions(window=20), TextOptions()):
        for head_dim in (32, 64, 80, 128, 256, 512):
            kv = draw(2, step.batch.tokens, KV_HEADS, head_dim)
            q = draw(step.batch.tokens, HEADS, head_dim)
            plan = texts.plan_texts(step.batch)
            texts.attend_texts(q, *kv, plan, options)


def attend_deterministically() -> None:
    """Rows of one query in the kernel of those of several, with a window and without."""
    step = lay_out([Spec(1, 40), Spec(9, 40), Spec(50, 50, piece=4)], CPU)
    pools = draw(2, step.slots, KV_HEADS, HEAD_DIM)
    q = draw(step.batch.tokens, HEADS, HEAD_DIM)
    for window in (None, 20):
        plan = attention.plan_attention(step.batch, window)
        attention.attention(q, pools[0], pools[1], plan, deterministic=True)


def attend_many_heads() -> None:
    """Falcon 7b's 71 share one key/value head."""
    step = lay_out([Spec(1, 40), Spec(9, 40)], CPU)
    pools, q = draw(2, step.slots, 1, 64), draw(step.batch.tokens, 71, 64)
    plan = attention.plan_attention(step.batch, None)
    attention.attention(q, pools[0], pools[1], plan, AttentionOptions(), None)


def attend_large_heads() -> None:
    """Heads of 512 numbers, of which 8 share keys and values, as in Gemma 4.

    And those of MiMo V2, whose values are shorter than keys.
    """
    sizes = (512, 512, 8), (192, 128, 16)
    for (keys, values, heads), dtype in itertools.product(sizes, (BF16, torch.float8_e4m3fn)):
        step = lay_out([Spec(1, 40), Spec(9, 40), Spec(9, 50, piece=4)], CPU)
        q = draw(step.batch.tokens, heads, keys)
        scales = None if dtype is BF16 else KVScales(*torch.ones(2, 1))
        options = AttentionOptions(sinks=None if keys == values else torch.ones(heads))
        plan = attention.plan_attention(step.batch, None if keys == values else 128)
        own = [draw(step.slots, 1, each).to(dtype) for each in (keys, values)]
        attention.attention(q, own[0], own[1], plan, options, scales)


def attend_8_bits() -> None:
    attend(True, AttentionOptions(), None)


def store() -> None:
    weight = draw(HEAD_DIM)
    frequencies = torch.ones(HEAD_DIM // 2)
    for tokens in (2, rotary.MANY_TOKENS):
        qkv = draw(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        places = torch.arange(tokens)
        angles = rotary.rotate(places, frequencies, 1.0, BF16)
        for norm in (None, HeadNorm(weight, weight, 1e-6)):
            pools = draw(2, tokens, KV_HEADS, HEAD_DIM)
            rotary.store_key_value(qkv, angles, norm, *pools, places)
    rotary.rotate(places.repeat(3, 1), frequencies, 1.0, BF16, torch.zeros(HEAD_DIM // 2).long())


def store_8_bits() -> None:
    places = torch.arange(2)
    angles = rotary.rotate(places, torch.ones(HEAD_DIM // 2), 1.0, BF16)
    pools = draw(2, 2, KV_HEADS, HEAD_DIM).to(torch.float8_e4m3fn)
    scales = KVScales(*torch.ones(2, KV_HEADS))
    qkv = draw(2, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rotary.store_key_value(qkv, angles, None, *pools, places, scales)


def multiply() -> None:
    """With every kind of tile that the table has for few rows, and one in splits."""
    weight, norm = draw(2 * HIDDEN, HIDDEN), RowNorm(draw(HIDDEN), 1e-6)
    table = measured(product.capability(CPU))
    entries = itertools.chain(table.otherwise, *table.by_shape.values())
    kinds = {(tile.kind, tile.bulk): tile for _, tile in entries}
    kinds.pop((Kind.LIBRARY, False), None)
    x, y, gated = draw(4, HIDDEN), draw(4, 2 * HIDDEN), draw(4, HIDDEN)
    for tile in kinds.values():
        product.multiply(x, weight, None, y, tile, add=True)
        if tile.kind is Kind.MULTIPLY_ADD:
            product.multiply(x, weight, None, gated, tile, norm=norm, activation=Activation.SILU)
        else:
            product.multiply(x, weight, None, y, replace(tile, splits=2), add=True)
    shared = launch.shared_bytes(CPU)
    for rows in (60, 300, 5000):
        tile = deterministic(product.capability(CPU), shared, gated=True).choose(4096, 4096, rows)
        product.multiply(x, weight, None, y, tile, add=True)
        product.multiply(x, weight, None, gated, tile, activation=Activation.SILU)


def multiply_quantised(every: bool = False) -> None:
    """Of every format, with rounded inputs and without, in a kernel for one row and another."""
    dense = torch.ones((2 * HIDDEN, HIDDEN))
    blocks = (torch.zeros((2 * HIDDEN, HIDDEN), dtype=torch.float8_e4m3fn), torch.ones((8, 4)))
    codes = torch.zeros((2 * HIDDEN, HIDDEN // 2), dtype=torch.uint8)
    exponents = torch.full((2 * HIDDEN, HIDDEN // 32), 120, dtype=torch.uint8)
    scales, index = exponents.float(), (torch.arange(HIDDEN) // 32).to(torch.int32)
    weights = {
        "int8": Int8Weight.made_of(dense),
        "int8-rounded": replace(Int8Weight.made_of(dense), rounding=Rounding(Number.INT8)),
        "fp8": Fp8Weight.made_of(dense),
        "fp8-blocks": Fp8Weight(*blocks, 128, 128, Rounding(Number.FP8, 128)),
        "int4": Int4Weight.made_of(dense),
        "groups8": GroupedWeight.made_of(dense),
        "mxfp4": GroupedWeight(codes, exponents, index, table=mxfp4.VALUES),
        "table4": GroupedWeight(codes, scales, index, table=torch.linspace(-1, 1, 16)),
    }
    zeros = torch.full_like(weights["int4"].scale, 7, dtype=torch.uint8)
    shifted = replace(weights["int4"], zero=zeros)
    table = quantised_tiles.measured(launch.capability(CPU))
    norm, bias = RowNorm(draw(HIDDEN), 1e-6), draw(2 * HIDDEN)
    for kind, weight in weights.items():
        entries = table.by_kind[kind]
        for most, _ in entries if every else {entries[0], entries[-1]}:
            x = draw(min(most, 300), HIDDEN)
            quantised.prepare_norm_linear(weight, None, norm, Activation.SILU)(x)
            quantised.prepare_add_linear(weight, bias)(x, draw(len(x), 2 * HIDDEN))
    for programs, rounds in ((0, False), (2, True), (0, True))[: None if every else 2]:
        tile = quantised_tiles.TokenTile(8, 128, 1, 0, rounds, programs)
        tiles = quantised_tiles.Tiles({"fp8": [(1, tile)]}, {})
        x = draw(1, HIDDEN)
        quantised.prepare_norm_linear(weights["fp8"], bias, norm, Activation.SILU, tiles)(x)
        if every:
            quantised.prepare_add_linear(weights["fp8"], None, tiles)(x, draw(1, 2 * HIDDEN))
    quantised.prepare_linear(shifted, None)(draw(1, HIDDEN))
    for weight in (shifted, weights["table4"]):
        quantised.prepare_linear(weight, None)(draw(100, HIDDEN))
    # A tile that was timed without gates.
    projected = Fp8Weight.made_of(torch.ones((6144, 4096)))
    norm = RowNorm(draw(4096), 1e-6)
    quantised.prepare_norm_linear(projected, None, norm, Activation.SILU)(draw(64, 4096))
    # bfloat16 has instructions of its own.
    for kind in ("int4", "groups8", "mxfp4", "table4"):
        quantised.prepare_linear(weights[kind], None)(draw(100, HIDDEN, dtype=torch.float16))


def multiply_quantised_with_every_tile() -> None:
    multiply_quantised(every=True)


def sum_over_ranks() -> None:
    """In kernels of both kinds, with fewer words than threads and with more."""
    weight, table = draw(2 * HIDDEN, HIDDEN), measured(product.capability(CPU))
    entries = [entry for _, entry in itertools.chain(table.otherwise, *table.by_shape.values())]
    kinds = {entry.kind: replace(entry, splits=1) for entry in entries}
    buffers = peers.SymmetricBuffers.at([0, 0], 0, 4096, CPU, together=1)
    for kind, tokens in ((Kind.MULTIPLY_ADD, 1), (Kind.MULTIPLY_ADD, 4), (Kind.MATRIX, 4)):
        residual = draw(tokens, 2 * HIDDEN)
        product.multiply(draw(tokens, HIDDEN), weight, None, residual, kinds[kind], buffers=buffers)


def experts_block() -> None:
    weights = ExpertWeights(draw(8, HIDDEN), draw(8, 512, HIDDEN), draw(8, HIDDEN, 256))
    norm, routing = RowNorm(draw(HIDDEN), 1e-6), Routing(2, True)
    add = experts.prepare_experts(weights, norm, Activation.SILU, routing)
    for tokens in (1, 40):
        add(draw(tokens, HIDDEN))


def experts_with_everything() -> None:
    """Routers by groups, and as PhiMoE's; biases, and what is normed already."""
    biases = (torch.zeros(8), torch.zeros(8), draw(8, 512), draw(8, HIDDEN))
    weights = ExpertWeights(draw(8, HIDDEN), draw(8, 512, HIDDEN), draw(8, HIDDEN, 256), *biases)
    groups = Routing(3, True, Score.SIGMOID, 4, 2, 2, scale=2.5, least_sum=1e-20)
    for routing in (groups, Routing(2, False, Score.SPARSEMIXER)):
        add = experts.prepare_experts(weights, None, Activation.SWIGLU_CLAMPED, routing)
        for tokens in (1, 40):
            add(draw(tokens, HIDDEN))
    plain = ExpertWeights(draw(8, HIDDEN), draw(8, 256, HIDDEN), draw(8, HIDDEN, 256))
    for tokens in (1, 40):
        add = experts.prepare_experts(plain, None, Activation.RELU_SQUARED, groups)
        add(draw(tokens, HIDDEN))


def stored_experts(every: bool = False) -> None:
    """Experts of few tokens and of many, of one format or of every one."""
    rows = torch.ones((8 * 2 * HIDDEN, HIDDEN))
    index = (torch.arange(HIDDEN) // 32).to(torch.int32)
    codes = torch.zeros((len(rows), HIDDEN // 2), dtype=torch.uint8)
    exponents = torch.full((len(rows), HIDDEN // 32), 120, dtype=torch.uint8)
    e4m3 = rows.to(torch.float8_e4m3fn)
    blocks = torch.ones((len(rows) // 128, HIDDEN // 128))
    formats = (
        Int8Weight.made_of(rows),
        replace(Int8Weight.made_of(rows), rounding=Rounding(Number.INT8)),
        Fp8Weight.made_of(rows),
        Fp8Weight(e4m3, blocks, 128, 128, Rounding(Number.FP8, 128)),
        Fp8Weight(e4m3, blocks, 128, 128, None),
        Int4Weight.made_of(rows),
        GroupedWeight.made_of(rows),
        GroupedWeight(codes, exponents, index, table=mxfp4.VALUES),
        GroupedWeight(codes, exponents, index, table=torch.linspace(-1, 1, 16)),
    )
    norm = RowNorm(draw(HIDDEN), 1e-6)
    for rows in formats if every else formats[:1]:
        stack = StackedWeight(rows, 8)
        weights = ExpertWeights(draw(8, HIDDEN), stack, stack)
        add = experts.prepare_experts(weights, norm, Activation.SILU, Routing(2, True))
        for tokens in (1, 300):
            add(draw(tokens, HIDDEN))


def stored_experts_of_every_format() -> None:
    stored_experts(every=True)


def latents() -> None:
    """Few heads and many, in splits and in one piece; rows are expanded, and asked themselves."""
    shape, norm = LatentShape(rank=512, rope=64, nope=128, value=128), RowNorm(draw(512), 1e-6)
    for heads, specs in ((16, [Spec(1, 40), Spec(200, 300)]), (128, [Spec(1, 40)] * 300)):
        step = lay_out(specs, CPU)
        batch, pool = step.batch, draw(step.slots, 1, 576)
        q, row = draw(batch.tokens, heads, 192), draw(batch.tokens, 700)[:, 124:]
        angles = rotary.rotate(batch.t_position, torch.ones(32), 1.0, BF16)
        OPERATIONS.store_latent(q, row, angles, norm, pool, batch.t_slot)
        plan = OPERATIONS.plan_latent(batch, shape)
        OPERATIONS.attend_latent(q, pool, draw(heads, 256, 512), shape, plan, 0.1)


def delta_nets() -> None:
    """Rows of one token and of several, of the heads that Qwen3.5 and Kimi Linear have.

    In float32 for tests, and what is launched where there may be drafts.
    """
    shapes = (MemoryShape(heads, 8, key_dim=128, value_dim=128, width=4) for heads in (4, 8))
    for shape, dtype, specs in itertools.product(
        shapes,
        (BF16, torch.float32),
        ([Spec(1, 40), Spec(9, 50), Spec(100, 100)], [Spec(1, 40)] * 40),
    ):
        batch = lay_out(specs, CPU).batch
        inputs = drawn_inputs(shape, batch.tokens, dtype)
        states, weights = drawn_states(shape, batch, dtype), drawn_weights(shape, dtype)
        plan = OPERATIONS.plan_recurrent(batch)
        OPERATIONS.gated_delta(inputs, weights, shape, states, plan)
        OPERATIONS.gated_delta(inputs, weights, shape, with_ring(states, shape, 4), plan)


def state_spaces() -> None:
    """Heads of Granite 4, Nemotron-H and Falcon-H1: one token each, prompts, and both.

    And what is launched where there may be drafts.
    """
    shapes = (
        MemoryShape(1, 128, 128, 64, 4),
        MemoryShape(8, 128, 128, 64, 4),
        MemoryShape(2, 32, 256, 128, 4),
    )
    for shape, norm in zip(shapes, NORMS, strict=True):
        weights = drawn_space(shape, BF16, norm=norm)
        for specs in ([Spec(1, 40)] * 8, [Spec(1, 40), Spec(70, 90)], [Spec(1, 40)]):
            batch = lay_out(specs, CPU).batch
            states, inputs = (
                drawn_states(shape, batch, BF16),
                space_inputs(shape, batch.tokens, BF16),
            )
            plan = OPERATIONS.plan_recurrent(batch)
            OPERATIONS.state_space(inputs, weights, shape, states, plan)
            longer = with_ring(states, shape, 4, beside=1)
            OPERATIONS.state_space(inputs, weights, shape, longer, plan)


def short_convolutions() -> None:
    """LFM2's: one token each, and prompts."""
    for specs in ([Spec(1, 40)] * 8, [Spec(1, 40), Spec(70, 90)]):
        batch = lay_out(specs, CPU).batch
        plan, weights = OPERATIONS.plan_recurrent(batch), drawn_convolution(2048, 3, BF16)
        states = convolution_states(2048, 3, batch, BF16)
        said = convolution_inputs(2048, batch.tokens, BF16)
        OPERATIONS.short_convolution(said, *weights, states, plan)


def adapted() -> None:
    """One token, some, and many; one part and three, with a bias and without."""
    ranks = torch.ones(4, dtype=torch.int32)
    for rows, bias in (((HIDDEN,), True), ((HIDDEN, 128, 128), False)):
        outputs = sum(rows)
        weights = AdapterWeights(
            draw(4, 16, len(rows), HIDDEN).transpose(1, 2),
            draw(4, 16, outputs),
            draw(4, outputs) if bias else None,
            rows,
            torch.ones(4, outputs),
            torch.ones(4, dtype=torch.int32),
        )
        for tokens in (1, 64, 400):
            plan = adapters.plan_adapters(torch.ones(tokens, dtype=torch.int64), ranks)
            x = draw(tokens, HIDDEN)
            adapters.adapt(x, draw(tokens, outputs), weights, plan)
            weight, own = draw(outputs, HIDDEN), Added(weights, plan, adapters.adapt)
            norm = RowNorm(draw(HIDDEN), 1e-5)
            assert OPERATIONS.adapted is not None
            base = OPERATIONS.prepare_linear(weight, None), DenseWeight(weight, None)
            OPERATIONS.adapted.linear(*base, norm, None)(x, own)
            OPERATIONS.adapted.add_linear(*base)(x, draw(tokens, outputs), own)
            if len(rows) == 1:
                down = draw(4, 2, 16, HIDDEN)
                halves = replace(weights, down=down, rows=(HIDDEN // 2, HIDDEN // 2))
                own = Added(halves, plan, adapters.adapt)
                OPERATIONS.adapted.linear(*base, norm, Activation.SILU)(x, own)
    head = AdapterWeights(
        draw(4, 1, 16, HIDDEN), draw(4, 16, adapters.WIDE), None, (adapters.WIDE,)
    )
    plan = adapters.plan_adapters(torch.ones(64, dtype=torch.int64), ranks)
    adapters.adapt(draw(64, HIDDEN), draw(64, adapters.WIDE), head, plan)
    weights = AdapterWeights(draw(4, 1, 16, 300), draw(4, 16, HIDDEN), None, (HIDDEN,))
    one = torch.ones(3, dtype=torch.int64)
    OPERATIONS.adapt_rows(draw(3, HIDDEN), weights, one, one, ranks)
    OPERATIONS.own_linear(
        draw(3, HIDDEN), draw(2, 300, HIDDEN), torch.ones(3, dtype=torch.int64), torch.ones(2).int()
    )


def others() -> None:
    pointwise.rms_norm(draw(3, HIDDEN), draw(HIDDEN), 1e-6)
    pointwise.rms_norm(draw(3, HIDDEN), draw(HIDDEN, dtype=torch.float32), 1e-6)
    pointwise.layer_norm(draw(3, HIDDEN), draw(HIDDEN), draw(HIDDEN), 1e-6)
    pointwise.layer_norm(draw(3, HIDDEN), None, None, 1e-6)
    pointwise.add_layer_norm(draw(3, HIDDEN), draw(3, HIDDEN), draw(HIDDEN), draw(HIDDEN), 1e-6)
    pointwise.act_mul(draw(3, HIDDEN), Activation.SILU)
    pointwise.activate(draw(3, HIDDEN), Activation.GELU)
    one, table = torch.zeros(3, dtype=torch.int64), torch.zeros((4, 64), dtype=torch.int32)
    for shifts in ({}, {"row_shift": one}):
        steps.remember(steps.resolve(one, one, one, one, table, one, **shifts)[0], one, one)
    steps.resolve(one, one, one, one, table, one, one, table)
    steps.accept(torch.zeros((1 + 2 * 3, 2), dtype=torch.int64), one, one, one, one)
    moved, rows = slots.SlotRows([draw(6, 2, 64)]), torch.zeros((3, 256), dtype=torch.uint8)
    moved.gather(one, rows)
    moved.scatter(rows, one)
    buffers = peers.SymmetricBuffers.at([0, 0], 0, peers.BLOCK, CPU)
    buffers.add(draw(peers.BLOCK), draw(peers.BLOCK))
    rows = peers.SymmetricBuffers.at([0, 0], 0, 512 * peers.BLOCK, CPU)
    for hidden in (4096, 2880):
        rows.add(draw(2, 2, hidden, dtype=torch.float32), draw(2, hidden))
    rows.gather(draw(2, 4096))
    buffers.tell(torch.zeros(3, dtype=torch.int64))


def sample() -> None:
    sampler = DeviceSampler(rows=4, vocab_size=5000, device=CPU, most_edits=16)
    rows = torch.zeros(4, dtype=torch.int64)
    logits = draw(4, 5000)
    sampler.begin(logits, rows, rows)
    sampler.finish(logits, rows, rows, Launches(True, True, True, True))


def sample_under_masks() -> None:
    sampler = DeviceSampler(rows=4, vocab_size=5000, device=CPU, most_edits=16)
    rows = torch.zeros(4, dtype=torch.int64)
    masks = torch.zeros((4, 157), dtype=torch.int32)
    logits = draw(4, 5000)
    sampler.begin(logits, rows, rows, masks)
    sampler.finish(logits, rows, rows, Launches(True, True, True), masks)


def offer_drafts() -> None:
    two = torch.zeros(2, dtype=torch.int64)
    offers.offer(draw(4, 5000), two, two, two, two, two)


FAMILIES: dict[str, Callable[[], None]] = {
    family.__name__: family
    for family in (
        attend_plainly,
        attend_deterministically,
        attend_with_everything,
        attend_many_heads,
        attend_whole_texts,
        attend_large_heads,
        attend_8_bits,
        store,
        store_8_bits,
        multiply,
        multiply_quantised,
        multiply_quantised_with_every_tile,
        sum_over_ranks,
        experts_block,
        experts_with_everything,
        stored_experts,
        stored_experts_of_every_format,
        latents,
        delta_nets,
        state_spaces,
        short_convolutions,
        adapted,
        others,
        sample,
        sample_under_masks,
        offer_drafts,
    )
}


#: What compiles the same kernels once more, for rarer arguments.
RARER = (
    attend_with_everything,
    attend_deterministically,
    attend_many_heads,
    attend_large_heads,
    multiply_quantised_with_every_tile,
    experts_with_everything,
    stored_experts_of_every_format,
    sample_under_masks,
)


if __name__ == "__main__":
    compile_launches((int(sys.argv[1]), int(sys.argv[2])))
    usual = [name for name, family in FAMILIES.items() if family not in RARER]
    rarer = [family.__name__ for family in RARER]
    for name in rarer if sys.argv[3:] == ["rarer"] else sys.argv[3:] or usual:
        FAMILIES[name]()
