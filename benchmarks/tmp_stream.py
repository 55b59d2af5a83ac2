"""Floors: how fast kernels that only read weights follow each other. One-off profiling."""
import itertools, os, sys, time, multiprocessing
from concurrent.futures import ProcessPoolExecutor
import torch, triton
import triton.language as tl
from tokenpod.kernels.triton.launch import await_inputs, options
from tokenpod.kernels.triton.product_kernels import ask_rows

@triton.jit
def stream(x, weight, y, n, words, MODE: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, AHEAD: tl.constexpr, FIRST: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
    at = weight + row.to(tl.int64)[:, None] * words + tl.arange(0, WORDS)[None, :]
    i = tl.arange(0, WORDS)[None, :]
    sums = tl.zeros((BLOCK_N, WORDS), tl.int32)
    if FIRST:
        next_w = tl.load(at, mask=i < words, other=0, eviction_policy="evict_first")
        if AHEAD > 0:
            ask_rows(weight, tl.program_id(0) * BLOCK_N, n, WORDS, words, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)
    if not FIRST:
        next_w = tl.load(at, mask=i < words, other=0, eviction_policy="evict_first")
    for start in tl.range(0, words, WORDS):
        w = next_w
        later = start + WORDS
        next_w = tl.load(at + later, mask=i + later < words, other=0, eviction_policy="evict_first")
        v = tl.load(x + start + i)
        if MODE == 0:
            sums ^= w ^ v
        else:
            # As many instructions as products of two digits.
            sums = tl.inline_asm_elementwise("{ .reg .b32 a; dp4a.s32.s32 a, $1, $2, $3; dp4a.s32.s32 $0, $1, $3, a; }", "=r,r,r,r", [w, v, sums], dtype=tl.int32, is_pure=True, pack=1)
    out = tl.sum(sums, axis=1)
    tl.store(y + row, out.to(tl.bfloat16))

@triton.jit
def unrolled(x, weight, y, n, MODE: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, AHEAD: tl.constexpr, FIRST: tl.constexpr, OVERLAP: tl.constexpr):
    """All of a row at once: WORDS is its length."""
    row = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
    i = tl.arange(0, WORDS)[None, :]
    at = weight + row.to(tl.int64)[:, None] * WORDS + i
    if FIRST:
        w = tl.load(at, eviction_policy="evict_first")
    await_inputs(OVERLAP)
    if not FIRST:
        w = tl.load(at, eviction_policy="evict_first")
    v = tl.load(x + i)
    sums = w ^ v
    if MODE == 1:
        sums = tl.inline_asm_elementwise("{ .reg .b32 a; dp4a.s32.s32 a, $1, $2, $3; dp4a.s32.s32 $0, $1, $3, a; }", "=r,r,r,r", [w, v, sums], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(y + row, tl.sum(sums, axis=1).to(tl.bfloat16))

@triton.jit
def tiny(x, y, WORDS: tl.constexpr, OVERLAP: tl.constexpr):
    """One program that reads a token, reduces and writes it, as rounding does."""
    i = tl.arange(0, WORDS)
    await_inputs(OVERLAP)
    v = tl.load(y + i * 2).to(tl.float32)
    most = tl.max(tl.abs(v))
    tl.store(x + i, (v * most).to(tl.int32))

SHAPES = {"qkv8": (6144, 4096), "out8": (4096, 4096), "gate_up8": (28672, 4096), "down8": (4096, 14336), "out4": (4096, 2048), "gate_up4": (28672, 2048), "down4": (4096, 7168)}
LOOPED = [(8, 128, 1), (16, 128, 1), (4, 256, 2), (8, 256, 2), (16, 256, 2), (4, 512, 4), (8, 512, 4), (16, 512, 4), (8, 1024, 8)]
def variants(shape):
    k = SHAPES[shape][1] // 4
    for (bn, words, warps), ahead in itertools.product(LOOPED, (0, 1024, 4096)):
        yield ("loop", bn, words, warps, ahead, True, 1, False)
    for bn, words, warps in (LOOPED[0], LOOPED[3], LOOPED[6]):
        yield ("loop", bn, words, warps, 0, False, 1, False)
        yield ("loop", bn, words, warps, 4096, True, 1, True)
    if k & (k - 1) == 0:
        for bn, warps in ((4, 2), (4, 4), (8, 4), (8, 8)):
            yield ("whole", bn, k, warps, 0, True, 1, False)
            yield ("whole", bn, k, warps, 0, False, 1, False)
            yield ("whole", bn, k, warps, 0, True, 1, True)

def launch(v, x, w, y):
    kind, bn, words, warps, ahead, first, mode, between = v
    o = options(True)
    if between:
        tiny[(1,)](x, y, 2048, num_warps=8, **o)
    n, k = w.shape
    if kind == "loop":
        stream[(triton.cdiv(n, bn),)](x, w, y, n, k, mode, bn, words, ahead, first, num_warps=warps, **o)
    else:
        unrolled[(triton.cdiv(n, bn),)](x, w, y, n, mode, bn, words, ahead, first, num_warps=warps, **o)

def tensors(shape, count):
    n, k = SHAPES[shape]
    x = torch.zeros(16384, dtype=torch.int32, device="cuda"); y = torch.zeros(32768, dtype=torch.bfloat16, device="cuda")
    return x, [torch.zeros((n, k // 4), dtype=torch.int32, device="cuda") for _ in range(count)], y

def compile_all(job):
    shape, part = job
    x, (w,), y = tensors(shape, 1)
    for v in list(variants(shape))[part::3]:
        try: launch(v, x, w, y)
        except Exception as e: print("FAILED", shape, v, str(e)[:200])
    torch.cuda.synchronize()

def main():
    began = time.monotonic()
    with ProcessPoolExecutor(15, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, [(s, p) for s in SHAPES for p in range(3)]))
    print(f"compiled {time.monotonic() - began:.0f} s", flush=True)
    for shape, (n, k) in SHAPES.items():
        if time.monotonic() - began > 55: break
        x, ws, y = tensors(shape, max(4, (300 << 20) // (n * k)))
        rows = []
        for v in variants(shape):
            try:
                launch(v, x, ws[0], y); torch.cuda.synchronize()
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g):
                    for w in ws: launch(v, x, w, y)
                times = []
                for _ in range(4):
                    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    a.record(); g.replay(); b.record(); torch.cuda.synchronize()
                    times.append(a.elapsed_time(b) * 1e3 / len(ws))
                rows.append((min(times), v))
            except Exception as e: print("FAILED", shape, v, str(e)[:100])
        rows.sort()
        floor = n * k / 4.8e6
        print(f"{shape} floor {floor:.2f} us")
        for t, v in rows: print(f"  {t:7.2f} {floor/t:4.0%} {v}")
        sys.stdout.flush()
if __name__ == "__main__":
    main()
