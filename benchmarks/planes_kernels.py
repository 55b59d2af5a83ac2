"""Prototype kernels."""

import triton
import triton.language as tl

from tokenpod.kernels.triton.launch import await_inputs
from tokenpod.kernels.triton.pointwise import gated_unit
from tokenpod.kernels.triton.product_kernels import ask_rows


@triton.jit
def int4_planes(packed):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, one, off;
        mov.b32 one, 0x3F803F80;
        mov.b32 off, 0xC308C308;
        shr.u32 a, $4, 4;
        shr.u32 b, $4, 8;
        shr.u32 c, $4, 12;
        lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, $0, one, off;
        fma.rn.bf16x2 $1, $1, one, off;
        fma.rn.bf16x2 $2, $2, one, off;
        fma.rn.bf16x2 $3, $3, one, off;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def mxfp4_planes(packed):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, m, large, none;
        mov.b32 large, 0x7E807E80;
        mov.b32 none, 0x80008000;
        shl.b32 s, $4, 12;
        shl.b32 m, $4, 6;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        fma.rn.bf16x2 $0, m, large, none;
        shl.b32 s, $4, 8;
        shl.b32 m, $4, 2;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        fma.rn.bf16x2 $1, m, large, none;
        shl.b32 s, $4, 4;
        shr.u32 m, $4, 2;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        fma.rn.bf16x2 $2, m, large, none;
        shr.u32 m, $4, 6;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, $4, 0x80008000, m, 0xEA;
        fma.rn.bf16x2 $3, m, large, none;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def table_planes(packed, t0, t1, t2, t3, t4, t5, t6, t7):
    """Nibble 2p + h of a word is plane p of its half h; t0..t3 low bytes of the table, t4..t7 high."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 c, h, m, e, f, a, b, lo, hi;
        and.b32 c, $4, 0x77777777;
        shr.u32 m, $4, 3;
        and.b32 m, m, 0x11111111;
        prmt.b32 e, $5, $7, c;
        prmt.b32 f, $9, $11, c;
        prmt.b32 a, 0x0000FF00, 0, m;
        lop3.b32 lo, a, f, e, 0xCA;
        prmt.b32 e, $13, $15, c;
        prmt.b32 f, $17, $19, c;
        lop3.b32 hi, a, f, e, 0xCA;
        prmt.b32 $0, lo, hi, 0x5140;
        prmt.b32 $1, lo, hi, 0x7362;
        shr.u32 c, c, 16;
        shr.u32 m, m, 16;
        prmt.b32 e, $5, $7, c;
        prmt.b32 f, $9, $11, c;
        prmt.b32 a, 0x0000FF00, 0, m;
        lop3.b32 lo, a, f, e, 0xCA;
        prmt.b32 e, $13, $15, c;
        prmt.b32 f, $17, $19, c;
        lop3.b32 hi, a, f, e, 0xCA;
        prmt.b32 $2, lo, hi, 0x5140;
        prmt.b32 $3, lo, hi, 0x7362;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [packed, t0, t1, t2, t3, t4, t5, t6, t7],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def int8_planes(packed):
    """Two's complement bytes: low seven bits less 128 or 256 - 128 ..."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, h, minus;
        mov.b32 minus, 0xBF80BF80;
        shr.u32 h, $2, 8;
        lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 b, $2, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 c, h, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 d, h, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, b, minus, a;
        fma.rn.bf16x2 $1, d, minus, c;
        }""",
        "=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled(w, s):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }",
        "=r,r,r",
        [w, tl.broadcast_to(s[:, None], w.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def inputs(at_x, norm_weight, i, is_x):
    v = tl.load(at_x[None, :] + i[:, None], mask=is_x[None, :], other=0)
    if norm_weight is not None:
        v = v * tl.load(norm_weight + i)[:, None]
    return v


@triton.jit
def halves(word):
    low = (word & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def factor(s):
    if s.dtype == tl.uint8:
        return (s.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return s.to(tl.float32)


@triton.jit
def step_scales(at_s, step, n, PLANES: tl.constexpr, PER: tl.constexpr, MODE: tl.constexpr):
    """Of a step: as many as there are groups in it, at most 4; the rest the same as the first."""
    if MODE == "row":
        s = 0
        return s, s, s, s
    elif MODE == "words" or MODE == "words_sums":
        a, b = halves(tl.load(at_s + step * n))
        return a, a, b, b
    elif PER >= PLANES:
        s = tl.load(at_s + (step * PLANES // PER) * n)
        return s, s, s, s
    elif PER == 2:
        a = tl.load(at_s + (step * 2) * n)
        b = tl.load(at_s + (step * 2 + 1) * n)
        return a, a, b, b
    else:
        a = tl.load(at_s + (step * PLANES) * n)
        b = tl.load(at_s + (step * PLANES + 1) * n)
        c, d = a, b
        if PLANES == 4:
            c = tl.load(at_s + (step * PLANES + 2) * n)
            d = tl.load(at_s + (step * PLANES + 3) * n)
        return a, b, c, d


@triton.jit
def add_planes(
    sums,
    w0,
    w1,
    w2,
    w3,
    v0,
    v1,
    v2,
    v3,
    a,
    b,
    c,
    d,
    PLANES: tl.constexpr,
    PER: tl.constexpr,
    MODE: tl.constexpr,
):
    if MODE == "row":
        sums = tl.dot(w0, v0, sums)
        sums = tl.dot(w1, v1, sums)
        if PLANES == 4:
            sums = tl.dot(w2, v2, sums)
            sums = tl.dot(w3, v3, sums)
    elif MODE == "words":
        sums = tl.dot(scaled(w0, a), v0, sums)
        sums = tl.dot(scaled(w1, b), v1, sums)
        if PLANES == 4:
            sums = tl.dot(scaled(w2, c), v2, sums)
            sums = tl.dot(scaled(w3, d), v3, sums)
    elif PER == 1:
        sums += tl.dot(w0, v0) * factor(a)[:, None]
        sums += tl.dot(w1, v1) * factor(b)[:, None]
        if PLANES == 4:
            sums += tl.dot(w2, v2) * factor(c)[:, None]
            sums += tl.dot(w3, v3) * factor(d)[:, None]
    elif PER == 2:
        dot = tl.dot(w0, v0)
        dot = tl.dot(w1, v1, dot)
        sums += dot * factor(a)[:, None]
        if PLANES == 4:
            dot = tl.dot(w2, v2)
            dot = tl.dot(w3, v3, dot)
            sums += dot * factor(c)[:, None]
    else:
        dot = tl.dot(w0, v0)
        dot = tl.dot(w1, v1, dot)
        if PLANES == 4:
            dot = tl.dot(w2, v2, dot)
            dot = tl.dot(w3, v3, dot)
        sums += dot * factor(a)[:, None]
    return sums


@triton.jit
def decode(packed, KIND: tl.constexpr, t0, t1, t2, t3, t4, t5, t6, t7):
    if KIND == "int4":
        return int4_planes(packed)
    elif KIND == "mxfp4":
        return mxfp4_planes(packed)
    elif KIND == "table4":
        return table_planes(packed, t0, t1, t2, t3, t4, t5, t6, t7)
    else:
        a, b = int8_planes(packed)
        return a, b, a, b


@triton.jit(do_not_specialize=["tokens"])
def planes(
    x,
    weight,
    scale,
    table,
    norm_weight,
    y,
    x_stride,
    y_stride,
    tokens,
    n,
    k,
    epsilon,
    row_words,
    KIND: tl.constexpr,
    MODE: tl.constexpr,
    PLANES: tl.constexpr,
    PER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST_K: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != "none"
    ROWS = 2 * n if GATED else n
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_T)
    is_x = token < tokens
    own = tl.minimum(row, n - 1)
    at_w = weight + own.to(tl.int64) * row_words
    at_up = weight + (own + n).to(tl.int64) * row_words
    steps = tl.cdiv(k, PLANES * WIDTH)
    share = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, steps)
    ask_rows(weight, first_row, n, first * WIDTH, row_words, BLOCK_N, AHEAD)
    if GATED:
        ask_rows(weight, first_row + n, 2 * n, first * WIDTH, row_words, BLOCK_N, AHEAD)
    t0, t1, t2, t3, t4, t5, t6, t7 = 0, 0, 0, 0, 0, 0, 0, 0
    if KIND == "table4":
        t0, t1 = tl.load(table), tl.load(table + 1)
        t2, t3 = tl.load(table + 2), tl.load(table + 3)
        t4, t5 = tl.load(table + 4), tl.load(table + 5)
        t6, t7 = tl.load(table + 6), tl.load(table + 7)
    at_s = scale + own
    up_s = scale + own + n
    LATE: tl.constexpr = MODE == "words" or MODE == "row"  # loaded in their step
    na, nb, nc, nd = step_scales(at_s, first, ROWS, PLANES, PER, MODE)
    ua, ub, uc, ud = na, nb, nc, nd
    if GATED:
        ua, ub, uc, ud = step_scales(up_s, first, ROWS, PLANES, PER, MODE)
    await_inputs(OVERLAP)
    at_x = x + token.to(tl.int64) * x_stride
    if norm_weight is not None:
        every = tl.arange(0, MOST_K)
        all_x = tl.load(x + every, mask=every < k, other=0.0).to(tl.float32)
        rms = tl.rsqrt(tl.sum(all_x * all_x, axis=0) / k + epsilon)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_T) if GATED else (1, 1), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES, loop_unroll_factor=UNROLL):
        j = step * WIDTH + tl.arange(0, WIDTH)
        i = step * (PLANES * WIDTH) + tl.arange(0, WIDTH)
        v0 = inputs(at_x, norm_weight, i, is_x)
        v1 = inputs(at_x, norm_weight, i + WIDTH, is_x)
        v2, v3 = v0, v1
        if PLANES == 4:
            v2 = inputs(at_x, norm_weight, i + 2 * WIDTH, is_x)
            v3 = inputs(at_x, norm_weight, i + 3 * WIDTH, is_x)
        if LATE:
            a, b, c, d = step_scales(at_s, step, ROWS, PLANES, PER, MODE)
        else:
            a, b, c, d = na, nb, nc, nd
            na, nb, nc, nd = step_scales(
                at_s, tl.minimum(step + 1, last - 1), ROWS, PLANES, PER, MODE
            )
        packed = tl.load(at_w[:, None] + j[None, :], eviction_policy="evict_first")
        w0, w1, w2, w3 = decode(packed, KIND, t0, t1, t2, t3, t4, t5, t6, t7)
        sums = add_planes(sums, w0, w1, w2, w3, v0, v1, v2, v3, a, b, c, d, PLANES, PER, MODE)
        if GATED:
            if LATE:
                a, b, c, d = step_scales(up_s, step, ROWS, PLANES, PER, MODE)
            else:
                a, b, c, d = ua, ub, uc, ud
                ua, ub, uc, ud = step_scales(
                    up_s, tl.minimum(step + 1, last - 1), ROWS, PLANES, PER, MODE
                )
            packed = tl.load(at_up[:, None] + j[None, :], eviction_policy="evict_first")
            w0, w1, w2, w3 = decode(packed, KIND, t0, t1, t2, t3, t4, t5, t6, t7)
            up_sums = add_planes(
                up_sums, w0, w1, w2, w3, v0, v1, v2, v3, a, b, c, d, PLANES, PER, MODE
            )
    if MODE == "row":
        sums *= tl.load(scale + own).to(tl.float32)[:, None]
        if GATED:
            up_sums *= tl.load(scale + own + n).to(tl.float32)[:, None]
    if norm_weight is not None:
        sums *= rms
        up_sums *= rms
    inside = is_x[None, :] & (row < n)[:, None]
    if SPLITS > 1:
        at_part = (tl.program_id(1).to(tl.int64) * tokens + token[None, :]) * n + row[:, None]
        tl.store(y + at_part, sums, mask=inside)
    else:
        out = sums
        if GATED:
            out = gated_unit(sums, up_sums, ACTIVATION)
        at_y = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
        out = out.to(y.dtype.element_ty)
        if ADD:
            out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def wide(w, FP8: tl.constexpr):
    return w.to(tl.float8e4nv, bitcast=True).to(tl.float32) if FP8 else w.to(tl.float32)


@triton.jit
def rows8(
    x,
    weight,
    scale,
    norm_weight,
    y,
    n,
    k,
    epsilon,
    FP8: tl.constexpr,
    ROUND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token, in registers, times a weight of 8 bits whose rows programs walk over."""
    GATED: tl.constexpr = ACTIVATION != "none"
    i = tl.arange(0, BLOCK_K)
    there = i < k
    first = tl.program_id(0) * BLOCK_N
    ask_rows(weight, first, n, 0, k, BLOCK_N, AHEAD)
    if GATED:
        ask_rows(weight, first + n, 2 * n, 0, k, BLOCK_N, AHEAD)
    if norm_weight is not None:
        nw = tl.load(norm_weight + i, mask=there, other=0.0)
    await_inputs(OVERLAP)
    loaded = tl.load(x + i, mask=there, other=0.0)
    v = loaded.to(tl.float32)
    if norm_weight is not None:
        v = v * tl.rsqrt(tl.sum(v * v, axis=0) / k + epsilon)
        v = v.to(loaded.dtype).to(tl.float32) * nw.to(tl.float32)
        v = v.to(loaded.dtype).to(tl.float32)
    unit = 1.0
    if ROUND:
        unit = tl.max(tl.abs(v), axis=0) / 448.0
        q = v * tl.where(unit > 0, 1.0 / unit, 1.0)
        v = tl.minimum(tl.maximum(q, -448.0), 448.0).to(tl.float8e4nv).to(tl.float32)
    for start in tl.range(first, n, tl.num_programs(0) * BLOCK_N, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_N)
        own = tl.minimum(row, n - 1)
        at = weight + own.to(tl.int64)[:, None] * k + i[None, :]
        if EVEN:
            w = tl.load(at, eviction_policy="evict_first")
        else:
            w = tl.load(at, mask=there[None, :], other=0, eviction_policy="evict_first")
        s = tl.load(scale + own).to(tl.float32)
        out = tl.sum(wide(w, FP8) * v[None, :], axis=1) * (s * unit)
        if GATED:
            at += n.to(tl.int64) * k
            if EVEN:
                w = tl.load(at, eviction_policy="evict_first")
            else:
                w = tl.load(at, mask=there[None, :], other=0, eviction_policy="evict_first")
            s = tl.load(scale + own + n).to(tl.float32)
            up = tl.sum(wide(w, FP8) * v[None, :], axis=1) * (s * unit)
            out = gated_unit(out, up, ACTIVATION)
        out = out.to(y.dtype.element_ty)
        if ADD:
            out = out.to(tl.float32) + tl.load(y + row, mask=row < n, other=0.0).to(tl.float32)
        tl.store(y + row, out.to(y.dtype.element_ty), mask=row < n)
