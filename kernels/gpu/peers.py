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

A message that is longer than the buffer takes several launches. That a sum also norms the stream
that it meets was tried: a norm starts while the sum before it runs, and takes as long apart.

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

#: Words of 32 bits that a program sends and sums, and that are counted together.
BLOCK = 512
#: Where there is no message: NaN as one number and as two, and larger than any token.
EMPTY: tl.constexpr = tl.constexpr(0x7FFF7FFF)
#: The same twice: what memory of 64 bits is filled with.
EMPTY_PAIR = 0x7FFF7FFF7FFF7FFF
_WARPS = 4


@dataclass(frozen=True, slots=True)
class SymmetricBuffers:
    """One rank's view of the buffers of one kind of collective. All ranks use them in one order."""

    rank: int
    world: int
    #: 32-bit words that are sent at a time: a multiple of BLOCK.
    capacity: int
    #: [world] int64 on the device: the addresses of all ranks' buffers, EMPTY at first, multiples
    #: of 16.
    addresses: torch.Tensor
    #: [capacity / words that are counted together] int32 on the device: launches so far. Blocks
    #: are, or for `product_sums` each word is alone.
    counts: torch.Tensor

    @staticmethod
    def words(world: int, capacity: int) -> int:
        """64-bit words of one buffer."""
        return world * capacity  # two halves of 32-bit words

    @classmethod
    def at(
        cls,
        addresses: list[int],
        rank: int,
        capacity: int,
        device: torch.device,
        *,
        together: int = BLOCK,
    ) -> SymmetricBuffers:
        """With counts of its own, one for every `together` words."""
        return cls(
            rank,
            len(addresses),
            capacity,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(capacity // together, dtype=torch.int32, device=device),
        )

    def fit(self, x: torch.Tensor) -> bool:
        """Whether x, of any shape, is whole words of 32 bits, and not too many for one launch."""
        return x.nbytes % 4 == 0 and x.nbytes <= 4 * self.capacity

    def sum(self, x: torch.Tensor) -> None:
        """Add up x of all ranks, in place; contiguous numbers of 16 or 32 bits, whole words."""
        for own in _pieces(x, self.capacity):
            self._launch(own, own, x.dtype)

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """Add the sum of all ranks' `partial` [T, n] to the residual stream [T, n].

        Contiguous numbers of 16 or 32 bits, whole words. Partial may be float32 of more dimensions,
        [splits, T, n]: what programs along k have summed, added up first; then the stream `fits`.
        """
        if partial.dim() > residual.dim():
            into = residual.view(-1).view(torch.int32)
            self._launch(partial, into, residual.dtype, ADD=True, SPLITS=len(partial))
            return
        sides = _pieces(partial, self.capacity), _pieces(residual, self.capacity)
        for part, into in zip(*sides, strict=True):
            self._launch(part, into, residual.dtype, ADD=True)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, local] -> [n, world · local]: the ranks' columns, those of rank 0 first.

        Contiguous; a row is whole words.
        """
        n, local = x.shape
        gathered = x.new_empty((n, self.world * local))
        row = local * x.itemsize // 4
        size = self.capacity // row * row
        pieces = _pieces(x, size), _pieces(gathered, self.world * size)
        for part, into in zip(*pieces, strict=True):
            self._launch(part, into, x.dtype, row, GATHER=True)
        return gathered

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

    def _launch(
        self,
        own: torch.Tensor,
        target: torch.Tensor,
        kind: torch.dtype,
        row: int = 0,
        **constants: int,
    ) -> None:
        """A launch for words `own`, of which a program has BLOCK."""
        words = target.numel() // (self.world if constants.get("GATHER") else 1)
        assert words <= self.capacity, f"{words} words; {self.capacity} fit"
        _sum_over_ranks[(triton.cdiv(words, BLOCK),)](
            own,
            target,
            self.addresses,
            self.counts,
            words,
            row,
            self.capacity,
            KIND=str(kind).removeprefix("torch."),
            RANK=self.rank,
            WORLD=self.world,
            BLOCK=BLOCK,
            num_warps=_WARPS,
            **{"ADD": False, "GATHER": False, "SPLITS": 0, **constants},
            **launch_options(target.device),
        )


def _pieces(x: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The words of contiguous numbers, so many at a time."""
    return torch.split(x.view(-1).view(torch.int32), size)


@launched
@triton.jit
def _sum_over_ranks(
    partial,
    target,
    addresses,
    counts,
    words,
    row,
    capacity,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ADD: tl.constexpr,
    GATHER: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """With GATHER the target has each rank's words, `row` of them in each of its rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < words
    await_inputs(OVERLAP)
    launch = tl.load(counts + tl.program_id(0)) + 1
    if SPLITS > 0:
        own = word_of_splits(partial, i, words, inside, KIND, SPLITS)
    else:
        own = tl.load(partial + i, mask=inside, other=0)
    half = (launch & 1) * WORLD * capacity
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            send(own, addresses + rank, half + RANK * capacity + i, inside)
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
            word = receive(addresses + RANK, half + rank * capacity + i, inside)
        if GATHER:
            tl.store(target + i // row * (WORLD * row) + rank * row + i % row, word, mask=inside)
        else:
            rank_low, rank_high = numbers(word, KIND)
            sum_low += rank_low
            sum_high += rank_high
    if not GATHER:
        tl.store(target + i, word_of(low + sum_low, high + sum_high, KIND), mask=inside)
    # No thread may still have to read it.
    tl.debug_barrier()
    tl.store(counts + tl.program_id(0), launch)


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
