"""Small collectives among GPUs that can write to each other's memory, one launch each.

Every rank has a buffer, [2, world, capacity] words of 64 bits: a half for every other launch, in it
a place for each sender's message. A word is 32 bits of the message and, above them, the number of
the launch. Its sender writes it to the receiver's buffer in one piece; the receiver reads it until
the number is right. So no flag follows the message and no fence parts the two: a sum costs one trip
between GPUs. (NCCL calls this way of sending LL.)

Two halves are enough. A rank that is at launch n has heard from all others in launch n - 1, so they
have ended launch n - 2 and its half is free. Each block of words counts its own launches, since not
all launches have as many blocks; so any sequence of sizes will do. Counts are kept on the device,
which lets CUDA graphs replay a launch. (`product_sums` sends in the same way, from products
whose partial sums are summed; there each word counts alone.)

Numbers on words double the bytes that travel, which is what a long message waits for. In `flagged`
buffers a block of words travels as it is, and one word behind all blocks, its flag, has the number:
a fence, and half of the bytes. (NCCL calls this way Simple.) There a message may be longer than the
buffer: a program that has summed its block goes on with its block of the next `capacity` words, and
counts that as a further launch. No rank waits forever, though not all programs have room at once,
for the reason that `product_sums` gives.

`tell` sends in one direction only. Its half is free because of three of them in a row (of buffers
that serve `tell` alone) a sum of the whole group, of any kind, parts the first from the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched

#: Words of 32 bits that one program sends and sums. A word always belongs to the same program.
BLOCK = 512
#: The same of flagged buffers: more, since a block waits for a fence and a flag.
FLAGGED_BLOCK = 1024
_WARPS = 4
_FLAGGED_WARPS = 4


@dataclass(frozen=True, slots=True)
class SymmetricBuffers:
    """One rank's view of the buffers of one kind of collective. All ranks use them in one order."""

    rank: int
    world: int
    #: 32-bit words of the longest message, or of what is sent at a time where blocks are flagged: a
    #: multiple of a program's block.
    capacity: int
    #: [world] int64 on the device: the addresses of all ranks' buffers, zeros at first, multiples
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
        if flagged:  # of two 32-bit words each, or of two flags
            return world * (capacity + capacity // FLAGGED_BLOCK)
        return 2 * world * capacity

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
        self._sum(x, x, add=False)

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """Add the sum of x of all ranks to the residual stream.

        Contiguous numbers of 16 or 32 bits.
        """
        self._sum(partial, residual, add=True)

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

    def _sum(self, partial: torch.Tensor, target: torch.Tensor, *, add: bool) -> None:
        assert partial.is_contiguous()
        assert target.is_contiguous()
        assert partial.dtype == target.dtype
        assert self.fit(partial), f"{partial.nbytes} bytes; {4 * self.capacity} fit"
        words = partial.nbytes // 4
        kernel, block, warps = _sum_over_ranks, BLOCK, _WARPS
        if self.flagged:
            kernel, block, warps = _sum_flagged_over_ranks, FLAGGED_BLOCK, _FLAGGED_WARPS
        kernel[(triton.cdiv(min(words, self.capacity), block),)](
            partial.view(torch.int32),
            target.view(torch.int32),
            self.addresses,
            self.counts,
            words,
            self.capacity,
            KIND=str(partial.dtype).removeprefix("torch."),
            ADD=add,
            RANK=self.rank,
            WORLD=self.world,
            BLOCK=block,
            num_warps=warps,
            **launch_options(partial.device),
        )


@launched
@triton.jit
def _sum_over_ranks(
    partial,
    target,
    addresses,
    counts,
    words,
    capacity,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    launch = tl.load(counts + tl.program_id(0)) + 1
    own = tl.load(partial + i, mask=i < words, other=0)
    half = (launch & 1) * WORLD * capacity
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            send(own, launch, addresses + rank, half + RANK * capacity + i, i < words)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        low, high = numbers(tl.load(target + i, mask=i < words, other=0), KIND)
    # In the order of ranks, so that rounding is the same on all of them.
    sum_low = tl.zeros((BLOCK,), tl.float32)
    sum_high = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        word = own
        if rank != RANK:
            word = receive(launch, addresses + RANK, half + rank * capacity + i, i < words)
        rank_low, rank_high = numbers(word, KIND)
        sum_low += rank_low
        sum_high += rank_high
    tl.store(target + i, word_of(low + sum_low, high + sum_high, KIND), mask=i < words)
    tl.store(counts + tl.program_id(0), launch)


@launched
@triton.jit
def _sum_flagged_over_ranks(
    partial,
    target,
    addresses,
    counts,
    words,
    capacity,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    launch = tl.load(counts + block)
    start = 0
    while start + block * BLOCK < words:
        launch += 1
        i = start + place
        own = tl.load(partial + i, mask=i < words, other=0)
        half = (launch & 1) * WORLD
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                sent = words_at(addresses + rank) + (half + RANK) * capacity
                tl.store(sent + place, own, mask=i < words)
        # All threads have sent before one says so.
        tl.debug_barrier()
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                flag = flag_of(addresses + rank, half + RANK, block, capacity, WORLD, BLOCK)
                tl.atomic_xchg(flag, launch, sem="release", scope="sys")
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
                flag = flag_of(addresses + RANK, half + rank, block, capacity, WORLD, BLOCK)
                heard = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                while heard != launch:
                    heard = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                received = words_at(addresses + RANK) + (half + rank) * capacity
                word = tl.load(received + place, mask=i < words, other=0, cache_modifier=".cg")
            rank_low, rank_high = numbers(word, KIND)
            sum_low += rank_low
            sum_high += rank_high
        tl.store(target + i, word_of(low + sum_low, high + sum_high, KIND), mask=i < words)
        start += capacity
    # No thread may still have to read it.
    tl.debug_barrier()
    tl.store(counts + block, launch)


@triton.jit
def words_at(address):
    """The words of the flagged buffer at `address`: [2, world, capacity], then flags."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def flag_of(address, place, block, capacity, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Where the flag of a block is in that buffer; place: of half and sender, one of 2 · WORLD."""
    flags = words_at(address) + 2 * WORLD * capacity
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
            send(own, launch, addresses + rank, half + i, i < words)
    else:
        word = receive(launch, addresses + RANK, half + i, i < words)
        tl.store(tokens + i, word.to(tl.int64), mask=i < words)
    # No thread may still have to read it.
    tl.debug_barrier()
    tl.store(counts + tl.program_id(0), launch)


@triton.jit
def send(own, launch, address, at, inside):
    """Words `own`, numbered with `launch`, to places `at` of the buffer at `address`."""
    buffer = tl.load(address).to(tl.pointer_type(tl.int64))
    stamped = (launch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    tl.store(buffer + at, stamped, mask=inside)


@triton.jit
def receive(launch, address, at, inside):
    """Words at places `at` of that buffer, once all that are `inside` have the number `launch`.

    At least as many words as threads: only then no two threads read the same one, and the threads
    of a warp leave the loop together.
    """
    buffer = tl.load(address).to(tl.pointer_type(tl.int64))
    got = tl.load(buffer + at, mask=inside, other=0, volatile=True)
    while tl.max(((got >> 32).to(tl.int32) != launch).to(tl.int32) * inside.to(tl.int32)) > 0:
        got = tl.load(buffer + at, mask=inside, other=0, volatile=True)
    return got.to(tl.int32)


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
