"""Small collectives among GPUs that can write to each other's memory, one launch each.

Every rank has a buffer, [2, world, capacity] words of 32 bits: a half for every other launch, in it
a place for each sender's message. Where there is no message all words are EMPTY. A sender writes
its words to the receiver's buffer; the receiver reads each until it is not EMPTY, and empties it
again. So no flag follows the message, no fence parts the two and nothing travels but the message: a
sum costs one trip between GPUs. EMPTY is no number and no token; words of a message that look like
it are sent as another NaN.

Two halves are enough. A rank that is at launch n has heard from all others in launch n - 1, so they
have ended launch n - 2, have emptied its half, and it is free. Each block of words counts its own
launches, since not all launches have as many blocks; so any sequence of sizes will do. Counts are
kept on the device, which lets CUDA graphs replay a launch. (`product_sums` sends in the same
way, from products whose partial sums are summed; there each word counts alone.)

A sum that meets the residual stream may also norm it: then a program has a whole row of tokens, and
the launch is the product's last, the sum and the next block's first.

A long message waits for how many words are looked at. In `flagged` buffers one word behind a block
of words, its flag, has the number of the launch, and follows them behind a fence. (NCCL calls this
way Simple.) There a message may be longer than the buffer: a program goes on with its block of the
next `capacity` words, counts that as a further launch, and sends it before it waits for the one
before. So there are four quarters: who sends for launch n + 1 has heard n - 1, which its sender
sent having read n - 3. No rank waits forever, though not all programs have room at once, for the
reason that `product_sums` gives.

`tell` sends in one direction only. Its half is free because of three of them in a row (of buffers
that serve `tell` alone) a sum of the whole group, of any kind, parts the first from the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.pointwise_ops import RowNorm

#: Words of 32 bits that are counted together, and that a program sends and sums, or several times
#: as many.
BLOCK = 512
#: Where there is no message: NaN as one number and as two, and larger than any token.
EMPTY: tl.constexpr = tl.constexpr(0x7FFF7FFF)
#: The same twice: what memory of 64 bits is filled with.
EMPTY_PAIR = 0x7FFF7FFF7FFF7FFF
#: The same of flagged buffers: more, since a block waits for a fence and a flag.
FLAGGED_BLOCK = 1024
_WARPS = 4
_FLAGGED_WARPS = 4
#: Words of the longest row that a program norms.
MOST_NORMED = 8192


@dataclass(frozen=True, slots=True)
class SymmetricBuffers:
    """One rank's view of the buffers of one kind of collective. All ranks use them in one order."""

    rank: int
    world: int
    #: 32-bit words of the longest message, or of what is sent at a time where blocks are flagged: a
    #: multiple of a program's block.
    capacity: int
    #: [world] int64 on the device: the addresses of all ranks' buffers, EMPTY at first, multiples
    #: of 16.
    addresses: torch.Tensor
    #: [capacity / words that are counted together] int32 on the device: launches so far. Blocks of
    #: a program are, or for `product_sums` each word is alone.
    counts: torch.Tensor
    #: Whether blocks carry a number instead of words.
    flagged: bool = False

    @staticmethod
    def words(world: int, capacity: int, *, flagged: bool = False) -> int:
        """64-bit words of one buffer."""
        # Of two 32-bit words each, or of two flags.
        return 2 * world * (capacity + capacity // FLAGGED_BLOCK) if flagged else world * capacity

    @classmethod
    def at(
        cls,
        addresses: list[int],
        rank: int,
        capacity: int,
        device: torch.device,
        *,
        together: int = BLOCK,
        flagged: bool = False,
    ) -> SymmetricBuffers:
        """With counts of its own, one for every `together` words, or for every flagged block."""
        together = FLAGGED_BLOCK if flagged else together
        return cls(
            rank,
            len(addresses),
            capacity,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(capacity // together, dtype=torch.int32, device=device),
            flagged,
        )

    def fit(self, x: torch.Tensor) -> bool:
        """Whether x, of any shape, is whole words of 32 bits, and not too many."""
        return x.nbytes % 4 == 0 and (self.flagged or x.nbytes <= 4 * self.capacity)

    def sum(self, x: torch.Tensor) -> None:
        """Add up x of all ranks, in place; contiguous numbers of 16 or 32 bits."""
        self._sum(x, x, None, add=False)

    def add(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: RowNorm | None = None
    ) -> torch.Tensor | None:
        """Add the sum of all ranks' `partial` to the residual stream.

        Contiguous numbers of 16 or 32 bits. Partial may be float32 of more dimensions, [splits, T,
        n]: what programs along k have summed, added up first; then these are not flagged buffers.

        Returns:
            The stream [T, n] normed, where a program can do that in the same launch; else None.
        """
        return self._sum(partial, residual, norm, add=True)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, local] -> [n, world · local]: the ranks' columns, those of rank 0 first.

        Contiguous numbers of 16 or 32 bits, whole words a row, in flagged buffers.
        """
        n, local = x.shape
        assert self.flagged
        assert x.is_contiguous()
        gathered = x.new_empty((n, self.world * local))
        self._launch_flagged(x, gathered, {"ADD": False}, local * x.itemsize // 4)
        return gathered

    def _launch_flagged(
        self, own: torch.Tensor, target: torch.Tensor, constants: dict[str, Any], row: int = 0
    ) -> None:
        words = own.nbytes // 4
        _sum_flagged_over_ranks[(triton.cdiv(min(words, self.capacity), FLAGGED_BLOCK),)](
            own.view(torch.int32),
            target.view(torch.int32),
            self.addresses,
            self.counts,
            words,
            self.capacity,
            row,
            GATHER=row > 0,
            KIND=str(own.dtype).removeprefix("torch."),
            RANK=self.rank,
            WORLD=self.world,
            BLOCK=FLAGGED_BLOCK,
            num_warps=_FLAGGED_WARPS,
            **constants,
            **launch_options(own.device),
        )

    def tell(self, tokens: torch.Tensor) -> None:
        """Rank 0's x on all ranks; tokens of less than 32 bits."""
        words = len(tokens)
        assert words <= self.capacity, f"{words} tokens; {self.capacity} fit"
        _tell[(triton.cdiv(words, BLOCK),)](
            tokens,
            self.addresses,
            self.counts,
            words,
            self.capacity,
            RANK=self.rank,
            WORLD=self.world,
            BLOCK=BLOCK,
            num_warps=_WARPS,
            **launch_options(tokens.device),
        )

    def _sum(
        self, partial: torch.Tensor, target: torch.Tensor, norm: RowNorm | None, *, add: bool
    ) -> torch.Tensor | None:
        assert partial.is_contiguous()
        assert target.is_contiguous()
        assert self.fit(target), f"{target.nbytes} bytes; {4 * self.capacity} fit"
        if self.flagged:
            assert partial.dtype == target.dtype
            self._launch_flagged(partial, target, {"ADD": add})
            return None
        splits = partial.shape[0] if partial.dim() > target.dim() else 0
        in_row, block = BLOCK, BLOCK
        if norm is not None:
            in_row = target.shape[1] * target.itemsize // 4
            block = max(triton.next_power_of_2(in_row), BLOCK)
            if target.itemsize == 4 or len(target) * block > self.capacity or block > MOST_NORMED:
                norm, in_row, block = None, BLOCK, BLOCK
        normed = None if norm is None else torch.empty_like(target)
        words = target.nbytes // 4
        _sum_over_ranks[(triton.cdiv(words, in_row),)](
            partial if splits else partial.view(torch.int32),
            target.view(torch.int32),
            None if norm is None else norm.weight,
            None if normed is None else normed.view(torch.int32),
            self.addresses,
            self.counts,
            words,
            in_row,
            self.capacity,
            0.0 if norm is None else norm.epsilon,
            KIND=str(target.dtype).removeprefix("torch."),
            ADD=add,
            RANK=self.rank,
            WORLD=self.world,
            SPLITS=splits,
            COUNTED=BLOCK,
            BLOCK=block,
            num_warps=_WARPS if norm is None else min(16, block // 128),
            **launch_options(target.device),
        )
        return normed


@launched
@triton.jit
def _sum_over_ranks(
    partial,
    target,
    norm_weight,
    normed,
    addresses,
    counts,
    words,
    in_row,
    capacity,
    epsilon,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SPLITS: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program sums `in_row` words; in buffers they have the places of a whole BLOCK."""
    in_block = tl.arange(0, BLOCK)
    i = tl.program_id(0) * in_row + in_block
    inside = (in_block < in_row) & (i < words)
    place = tl.program_id(0) * BLOCK + in_block
    if normed is not None:
        weight_low = tl.load(norm_weight + 2 * in_block, mask=inside, other=0.0)
        weight_high = tl.load(norm_weight + 2 * in_block + 1, mask=inside, other=0.0)
    await_inputs(OVERLAP)
    launch = tl.load(counts + place // COUNTED) + 1
    if SPLITS > 0:
        own = word_of_splits(partial, i, words, inside, KIND, SPLITS)
    else:
        own = tl.load(partial + i, mask=inside, other=0)
    half = (launch & 1) * WORLD * capacity
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            send(own, addresses + rank, half + RANK * capacity + place, inside)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        low, high = numbers(tl.load(target + i, mask=inside, other=0), KIND)
    # In the order of ranks, so that rounding is the same on all of them.
    sum_low = tl.zeros((BLOCK,), tl.float32)
    sum_high = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        word = own
        if rank != RANK:
            word = receive(addresses + RANK, half + rank * capacity + place, inside)
        rank_low, rank_high = numbers(word, KIND)
        sum_low += rank_low
        sum_high += rank_high
    total = word_of(low + sum_low, high + sum_high, KIND)
    tl.store(target + i, total, mask=inside)
    # No thread may still have to read it.
    tl.debug_barrier()
    tl.store(counts + place // COUNTED, launch, mask=in_block % COUNTED == 0)
    if normed is not None:
        low, high = numbers(total, KIND)
        factor = tl.rsqrt(tl.sum(low * low + high * high) / (2 * in_row) + epsilon)
        low *= factor
        high *= factor
        if weight_low.dtype != tl.float32:
            # Rounded before the weight is applied, as `rms_norm` does.
            low, high = numbers(word_of(low, high, KIND), KIND)
        low *= weight_low.to(tl.float32)
        high *= weight_high.to(tl.float32)
        tl.store(normed + i, word_of(low, high, KIND), mask=inside)


@triton.jit
def word_of_splits(
    partial, i, words, inside, KIND: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Words i of the sum of partials [SPLITS, words] of numbers in float32, rounded."""
    IN_WORD: tl.constexpr = 1 if KIND == "float32" else 2
    low = tl.zeros(i.shape, tl.float32)
    high = tl.zeros(i.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        at = partial + (words * split + i) * IN_WORD
        if IN_WORD == 1:
            low += tl.load(at, mask=inside, other=0.0)
        else:
            both = at[:, None] + tl.arange(0, 2)[None, :]
            one, other = tl.split(tl.load(both, mask=inside[:, None], other=0.0))
            low += one
            high += other
    return word_of(low, high, KIND)


@launched
@triton.jit
def _sum_flagged_over_ranks(
    partial,
    target,
    addresses,
    counts,
    words,
    capacity,
    row,
    GATHER: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """With GATHER the target has each rank's words, `row` of them in each of its rows."""
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    launch = tl.load(counts + block)
    own = tl.load(partial + place, mask=place < words, other=0)
    _send_flagged(own, addresses, launch + 1, block, words, capacity, RANK, WORLD, BLOCK)
    start = 0
    while start + block * BLOCK < words:
        launch += 1
        i = start + place
        following = tl.load(partial + i + capacity, mask=i + capacity < words, other=0)
        left = words - start - capacity
        _send_flagged(following, addresses, launch + 1, block, left, capacity, RANK, WORLD, BLOCK)
        quarter = (launch & 3) * WORLD
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        if ADD:
            low, high = numbers(tl.load(target + i, mask=i < words, other=0), KIND)
        # In the order of ranks, as above.
        sum_low = tl.zeros((BLOCK,), tl.float32)
        sum_high = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            word = own
            if rank != RANK:
                flag = flag_of(addresses + RANK, quarter + rank, block, capacity, WORLD, BLOCK)
                heard = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                while heard != launch:
                    heard = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                received = words_at(addresses + RANK) + (quarter + rank) * capacity
                word = tl.load(received + place, mask=i < words, other=0, cache_modifier=".cg")
            if GATHER:
                column = target + rank * row + i % row
                tl.store(column + i // row * (WORLD * row), word, mask=i < words)
            else:
                rank_low, rank_high = numbers(word, KIND)
                sum_low += rank_low
                sum_high += rank_high
        if not GATHER:
            tl.store(target + i, word_of(low + sum_low, high + sum_high, KIND), mask=i < words)
        own = following
        start += capacity
    # No thread may still have to read it.
    tl.debug_barrier()
    tl.store(counts + block, launch)


@triton.jit
def _send_flagged(
    own,
    addresses,
    launch,
    block,
    left,
    capacity,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block, as far as it is within the `left` words, and behind it its number."""
    place = block * BLOCK + tl.arange(0, BLOCK)
    quarter = (launch & 3) * WORLD
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            sent = words_at(addresses + rank) + (quarter + RANK) * capacity
            tl.store(sent + place, own, mask=place < left)
    # All threads have sent before one says so.
    tl.debug_barrier()
    if block * BLOCK < left:
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                flag = flag_of(addresses + rank, quarter + RANK, block, capacity, WORLD, BLOCK)
                tl.atomic_xchg(flag, launch, sem="release", scope="sys")


@triton.jit
def words_at(address):
    """The words of the flagged buffer at `address`: [4, world, capacity], then flags."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def flag_of(address, place, block, capacity, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Where the flag of a block is in that buffer; place: of quarter and sender, of 4 · WORLD."""
    flags = words_at(address) + 4 * WORLD * capacity
    return flags + place * (capacity // BLOCK) + block


@launched
@triton.jit
def _tell(
    tokens,
    addresses,
    counts,
    words,
    capacity,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    launch = tl.load(counts + tl.program_id(0)) + 1
    half = (launch & 1) * WORLD * capacity
    if RANK == 0:
        own = tl.load(tokens + i, mask=i < words, other=0).to(tl.int32)
        for rank in tl.static_range(1, WORLD):
            send(own, addresses + rank, half + i, i < words)
    else:
        word = receive(addresses + RANK, half + i, i < words)
        tl.store(tokens + i, word.to(tl.int64), mask=i < words)
    # No thread may still have to read it.
    tl.debug_barrier()
    tl.store(counts + tl.program_id(0), launch)


@triton.jit
def send(own, address, at, inside):
    """Words `own` to places `at` of the buffer at `address`."""
    buffer = tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int32)), 16)
    tl.store(buffer + at, tl.where(own == EMPTY, -1, own), mask=inside)


@triton.jit
def receive(address, at, inside):
    """Words at places `at` of that buffer, once all that are `inside` are there; then it is empty.

    At least as many words as threads: only then no two threads read the same one, and the threads
    of a warp leave the loop together.
    """
    buffer = tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int32)), 16)
    got = tl.load(buffer + at, mask=inside, other=0, volatile=True)
    while tl.max((got == EMPTY).to(tl.int32)) > 0:
        got = tl.load(buffer + at, mask=inside, other=0, volatile=True)
    tl.store(buffer + at, tl.full(got.shape, EMPTY, tl.int32), mask=inside)
    return got


@triton.jit
def numbers(word, KIND: tl.constexpr):
    """The one or two numbers in 32 bits, as float32; of one, the second is a copy."""
    if KIND == "float32":
        low = word.to(tl.float32, bitcast=True)
        high = low
    elif KIND == "bfloat16":
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(KIND == "float16")
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def word_of(low, high, KIND: tl.constexpr):
    """`numbers` back in 32 bits."""
    if KIND == "float32":
        word = low.to(tl.int32, bitcast=True)
    else:
        kind: tl.constexpr = tl.bfloat16 if KIND == "bfloat16" else tl.float16
        below = low.to(kind).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        above = high.to(kind).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = below | above
    return word
