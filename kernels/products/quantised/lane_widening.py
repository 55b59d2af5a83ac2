"""Codes in lanes (`lanes`) as numbers, two at a time, without changing their places."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.products.quantised.widening import PLUS, TIMES, halves, of_e2m1


@triton.constexpr_function
def table_assembly(table):
    """Instructions that make two lanes four pairs of bfloat16 out of a table of 8 words.

    A permutation of bytes takes four codes at a time, and looks into half of the table: its first
    half or its second is then chosen by the codes' highest bits.
    """
    words = "".join(f"mov.b32 t{i}, {word & 0xFFFFFFFF:#x};" for i, word in enumerate(table))
    looked_up = "".join(
        f"""
        prmt.b32 e, t0, t1, c;
        prmt.b32 f, t2, t3, c;
        prmt.b32 a, 0x0000FF00, 0, m;
        lop3.b32 lo, a, f, e, 0xCA;
        prmt.b32 e, t4, t5, c;
        prmt.b32 f, t6, t7, c;
        lop3.b32 hi, a, f, e, 0xCA;
        prmt.b32 ${first}, lo, hi, 0x5140;
        prmt.b32 ${first + 1}, lo, hi, 0x7362;
        shr.u32 c, c, 16;
        shr.u32 m, m, 16;"""
        for first in (0, 2)
    )
    return f"""{{
        .reg .b32 t<8>, c, m, e, f, a, lo, hi;
        {words}
        and.b32 c, $4, 0x77777777;
        shr.u32 m, $4, 3;
        and.b32 m, m, 0x11111111;{looked_up}
        }}"""


@triton.jit
def widened_lanes(
    at_row,
    scale,
    own,
    lane,
    block,
    row_lanes,
    blocks,
    rows,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Numbers [R, inputs] of R rows' lanes, scales included: as `scaled_planes` has them.

    Args:
        at_row: [R], where each row's lanes begin.
        scale: `Lanes.scale`, of `rows` rows.
        own: [R], which row each is.
        lane: [R or 1, lanes], which ones of the row's `row_lanes`, some of one block or whole ones.
        block: [R or 1, blocks], which ones of the row's `blocks` those are of.
        WIDTH: lanes that are of one block.
        EVEN: all lanes are inside.
    """
    packed = _load(at_row[:, None] + lane, lane < row_lanes, EVEN)
    BLOCKS: tl.constexpr = lane.shape[1] // WIDTH
    packed = tl.reshape(packed, (at_row.shape[0], BLOCKS, WIDTH))
    if SCALES == 0:
        w0, w1, w2, w3 = _whole(packed, KIND, TABLE, DTYPE, ASSEMBLY)
    else:
        s, z = _scales(scale, own[:, None], block, blocks, rows, SCALES, ZEROS, PLANES, EVEN)
        w0, w1, w2, w3 = scaled_planes(packed, s, z, KIND, TABLE, ZEROS, DTYPE, ASSEMBLY)
    if PLANES == 4:
        w = tl.permute(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (0, 1, 3, 4, 2))
    else:
        w = tl.permute(tl.join(w0, w1), (0, 1, 3, 2))
    return tl.reshape(w, (at_row.shape[0], PLANES * lane.shape[1]))


@triton.jit
def lane_numbers(
    at_row,
    scale,
    own,
    lane,
    block,
    blocks,
    rows,
    row_lanes,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    PLANES: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A block's numbers without scales, which are `Lanes.apart`: four planes [R, lanes].

    Multiples of 1 / `lane_unit`; of 8 bits two planes and again two. `block` is a number, what
    else is given is as for `widened_lanes`.
    """
    packed = tl.expand_dims(_load(at_row[:, None] + lane, lane < row_lanes, EVEN), 1)
    one = tl.full((at_row.shape[0], 1), 1.0, tl.float32)
    z = (one, one, one, one)
    if ZEROS:
        at = scale + (blocks + block) * SCALES * rows + own[:, None]
        EACH: tl.constexpr = PLANES // SCALES
        z = (
            tl.load(at).to(tl.float32, bitcast=True),
            tl.load(at + 1 // EACH * rows).to(tl.float32, bitcast=True),
            tl.load(at + 2 % PLANES // EACH * rows).to(tl.float32, bitcast=True),
            tl.load(at + 3 % PLANES // EACH * rows).to(tl.float32, bitcast=True),
        )
    s = (one, one, one, one)
    w0, w1, w2, w3 = scaled_planes(packed, s, z, KIND, TABLE, ZEROS, DTYPE, ASSEMBLY)
    shape: tl.constexpr = (packed.shape[0], packed.shape[2])
    return (
        tl.reshape(w0, shape),
        tl.reshape(w1, shape),
        tl.reshape(w2, shape),
        tl.reshape(w3, shape),
    )


@triton.jit
def scaled_planes(
    packed,
    s,
    z,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    ZEROS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """What lanes stand for, plane by plane: four tiles like `packed`, of 8 bits two and again two.

    They are rounded to DTYPE once, and multiples of 1 / `lane_unit`.

    Args:
        packed: [rows, blocks, width] int16; see `lanes`.
        s: of each of four planes [rows, blocks] float32, which bfloat16 holds.
        z: with ZEROS, what is added to whole numbers before, as `s`.
        KIND: "int4", "int8", "mxfp4" or "table4".
        TABLE: `Lanes.table`.
        DTYPE: what they become; instructions can be chosen for bfloat16.
        ASSEMBLY: whether they can.
    """
    if ASSEMBLY and tl.bfloat16 == DTYPE:
        if KIND == "int4" and not ZEROS:
            return _scaled_int4(packed, s)
        else:
            return _in_pairs(packed, s, z, KIND, TABLE, ZEROS)
    else:
        w0, w1, w2, w3 = _numbers(packed, KIND, TABLE)
        s0, s1, s2, s3 = s
        if ZEROS:
            z0, z1, z2, z3 = z
            w0, w1 = w0 + z0[:, :, None], w1 + z1[:, :, None]
            w2, w3 = w2 + z2[:, :, None], w3 + z3[:, :, None]
        return (
            (w0 * s0[:, :, None]).to(DTYPE),
            (w1 * s1[:, :, None]).to(DTYPE),
            (w2 * s2[:, :, None]).to(DTYPE),
            (w3 * s3[:, :, None]).to(DTYPE),
        )


@triton.jit
def _whole(
    packed, KIND: tl.constexpr, TABLE: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Numbers of 8 bits without scales, as DTYPE, which holds them exactly."""
    tl.static_assert(KIND == "int8")
    if ASSEMBLY and tl.bfloat16 == DTYPE:
        return _int8_lanes(packed)
    else:
        w0, w1, w2, w3 = _numbers(packed, KIND, TABLE)
        return w0.to(DTYPE), w1.to(DTYPE), w2.to(DTYPE), w3.to(DTYPE)


@triton.jit
def lane_unit(KIND: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """What sums are to be multiplied by, where numbers of `scaled_planes` are too small."""
    if KIND == "int4" and not ZEROS and ASSEMBLY and tl.bfloat16 == DTYPE:
        return 4096.0
    elif (KIND == "int4" or KIND == "int8") and ASSEMBLY and tl.bfloat16 == DTYPE:
        return 64.0
    else:
        return 1.0


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    """What is read once, and makes room for what is read again."""
    if EVEN:
        loaded = tl.load(at, eviction_policy="evict_first")
    else:
        loaded = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
    return loaded


@triton.jit
def _scales(
    scale,
    own,
    block,
    blocks,
    rows,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    PLANES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Scales of four planes (of two, twice), and what is added to their numbers: `Lanes.scale`."""
    WORDS: tl.constexpr = SCALES if ZEROS else (SCALES + 1) // 2
    at = scale + block * (WORDS * rows) + own
    inside = block < blocks
    z0, s0 = halves(_load(at, inside, EVEN))
    if ZEROS:
        z1, s1, z2, s2, z3, s3 = z0, s0, z0, s0, z0, s0
        if SCALES == 2:
            z2, s2 = halves(_load(at + rows, inside, EVEN))
            z3, s3 = z2, s2
        elif SCALES == 4:
            z1, s1 = halves(_load(at + rows, inside, EVEN))
            z2, s2 = halves(_load(at + 2 * rows, inside, EVEN))
            z3, s3 = halves(_load(at + 3 * rows, inside, EVEN))
    else:
        s1, s2, s3 = s0, s0, s0
        if SCALES == 2:
            s0, s2 = z0, s0
            s1, s3 = s0, s2
        elif SCALES == 4:
            s0, s1 = z0, s0
            s2, s3 = halves(_load(at + rows, inside, EVEN))
        z1, z2, z3 = z0, z0, z0
    if PLANES == 2 and SCALES == 2:
        # The second scale is the second plane's.
        s1, z1 = s2, z2
    return (s0, s1, s2, s3), (z0, z1, z2, z3)


@triton.jit
def _numbers(packed, KIND: tl.constexpr, TABLE: tl.constexpr):
    """Numbers without scales, float32."""
    if KIND == "int8":
        low = ((packed & 255) - 128).to(tl.float32)
        high = (((packed >> 8) & 255) - 128).to(tl.float32)
        return low, high, low, high
    elif KIND == "table4":
        # Codes of a pair of lanes share its bits.
        even, odd = tl.split(
            tl.reshape(packed, (packed.shape[0], packed.shape[1], packed.shape[2] // 2, 2))
        )
        word = (even.to(tl.int32) & 0xFFFF) | (odd.to(tl.int32) << 16)
        return (
            _of_pair(word, TABLE, packed.shape),
            _of_pair(word >> 8, TABLE, packed.shape),
            _of_pair(word >> 16, TABLE, packed.shape),
            _of_pair(word >> 24, TABLE, packed.shape),
        )
    elif KIND == "int4":
        return (
            ((packed & 15) - 8).to(tl.float32),
            (((packed >> 4) & 15) - 8).to(tl.float32),
            (((packed >> 8) & 15) - 8).to(tl.float32),
            (((packed >> 12) & 15) - 8).to(tl.float32),
        )
    else:
        return (
            of_e2m1(packed & 15),
            of_e2m1((packed >> 4) & 15),
            of_e2m1((packed >> 8) & 15),
            of_e2m1((packed >> 12) & 15),
        )


@triton.jit
def _of_pair(word, TABLE: tl.constexpr, SHAPE: tl.constexpr):
    return tl.reshape(tl.join(_of_table(word, TABLE), _of_table(word >> 4, TABLE)), SHAPE)


@triton.jit
def _scaled_int4(packed, s):
    """Each less 8, times its plane's scale, 4,096 times too small, by one instruction for two."""
    s0, s1, s2, s3 = s
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, $4, 0x00F000F0;
        and.b32 $2, high, 0x000F000F;
        and.b32 $3, high, 0x00F000F0;
        fma.rn.bf16x2 $0, $0, $5, $9;
        fma.rn.bf16x2 $1, $1, $6, $10;
        fma.rn.bf16x2 $2, $2, $7, $11;
        fma.rn.bf16x2 $3, $3, $8, $12;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [
            packed,
            # Codes are bits below the second exponent, multiples of 2⁻¹³³ and of 2⁻¹²⁹.
            _over(s0 * 2.0**121, packed),
            _over(s1 * 2.0**117, packed),
            _over(s2 * 2.0**121, packed),
            _over(s3 * 2.0**117, packed),
            _over(s0 * -(2.0**-9), packed),
            _over(s1 * -(2.0**-9), packed),
            _over(s2 * -(2.0**-9), packed),
            _over(s3 * -(2.0**-9), packed),
        ],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _in_pairs(packed, s, z, KIND: tl.constexpr, TABLE: tl.constexpr, ZEROS: tl.constexpr):
    """Numbers that are exact in bfloat16, then plus what is added, then times their scales."""
    if KIND == "int4":
        w0, w1, w2, w3 = _int4_lanes(packed)
    elif KIND == "mxfp4":
        w0, w1, w2, w3 = _e2m1_lanes(packed)
    elif KIND == "table4":
        w0, w1, w2, w3 = _table_lanes(packed, TABLE)
    else:
        w0, w1, w2, w3 = _int8_lanes(packed)
    s0, s1, s2, s3 = s
    if ZEROS:
        UNIT: tl.constexpr = 1 / 64 if KIND == "int4" or KIND == "int8" else 1.0
        z0, z1, z2, z3 = z
        w0, w1 = _on_pairs(w0, z0 * UNIT, PLUS), _on_pairs(w1, z1 * UNIT, PLUS)
        w2, w3 = _on_pairs(w2, z2 * UNIT, PLUS), _on_pairs(w3, z3 * UNIT, PLUS)
    return (
        _on_pairs(w0, s0, TIMES),
        _on_pairs(w1, s1, TIMES),
        _on_pairs(w2, s2, TIMES),
        _on_pairs(w3, s3, TIMES),
    )


@triton.jit
def _on_pairs(w, by_block, INSTRUCTION: tl.constexpr):
    """An instruction on two numbers of a tile at a time, and what their block has."""
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=r,r,r", [w, _over(by_block, w)], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _over(by_block, tile):
    return tl.broadcast_to(by_block.to(tl.bfloat16)[:, :, None], tile.shape)


@triton.jit
def _of_table(code, TABLE: tl.constexpr):
    """What 4 bits stand for in a table of 8 words: 16 low bytes of bfloat16, then the high ones."""
    code = code & 15
    low, high = tl.zeros_like(code), tl.zeros_like(code)
    for word in tl.static_range(4):
        shift = 8 * (code & 3)
        low = tl.where(code // 4 == word, (TABLE[word] >> shift) & 255, low)
        high = tl.where(code // 4 == word, (TABLE[4 + word] >> shift) & 255, high)
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _int4_lanes(packed):
    """Each less 8, and 64 times too small: bfloat16 has no larger factor.

    Bits below the second exponent are evenly spaced in bfloat16: two planes of four need no shift.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high, large, less_large, less;
        mov.b32 large, 0x7F007F00;
        mov.b32 less_large, 0x7D007D00;
        mov.b32 less, 0xBE00BE00;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, $4, 0x00F000F0;
        and.b32 $2, high, 0x000F000F;
        and.b32 $3, high, 0x00F000F0;
        fma.rn.bf16x2 $0, $0, large, less;
        fma.rn.bf16x2 $1, $1, less_large, less;
        fma.rn.bf16x2 $2, $2, large, less;
        fma.rn.bf16x2 $3, $3, less_large, less;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int8_lanes(packed):
    """Each less 128, and 64 times too small: as of int4, eight bits are evenly spaced, too."""
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 large, less;
        mov.b32 large, 0x7F007F00;
        mov.b32 less, 0xC000C000;
        and.b32 $0, $2, 0x00FF00FF;
        prmt.b32 $1, $2, 0, 0x4341;
        fma.rn.bf16x2 $0, $0, large, less;
        fma.rn.bf16x2 $1, $1, large, less;
        }""",
        "=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
    return low, high, low, high


@triton.jit
def _e2m1_lanes(packed):
    """The sign stays the highest bit; exponent and mantissa move to 2¹²⁶ times too small."""
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
def _table_lanes(packed, TABLE: tl.constexpr):
    return tl.inline_asm_elementwise(
        table_assembly(TABLE),
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
