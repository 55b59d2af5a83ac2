"""Collectives through peers' memory. Here all ranks' buffers are this process's memory.

Interpreted kernels run one after the other, and each would wait for the next rank's message. So the
messages that a rank receives are put into its buffer beforehand, as their senders would write them.
"""

from __future__ import annotations

import pytest
import torch
import triton

from support.kernels.interpreted import DEVICE
from tokenpod.kernels.gpu.peers import BLOCK, EMPTY, EMPTY_PAIR, FLAGGED_BLOCK, SymmetricBuffers
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.pointwise.triton_pointwise import rms_norm

WORDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2}


class Peers:
    """Ranks with buffers."""

    def __init__(self, world: int, blocks: int = 2, *, flagged: bool = False) -> None:
        self.world, self.flagged = world, flagged
        self.capacity = blocks * (FLAGGED_BLOCK if flagged else BLOCK)
        words = SymmetricBuffers.words(world, self.capacity, flagged=flagged)
        memory = torch.full((world, words), EMPTY_PAIR, dtype=torch.int64, device=DEVICE)
        addresses = [buffer.data_ptr() for buffer in memory]
        self.ranks = [
            SymmetricBuffers.at(addresses, rank, self.capacity, DEVICE, flagged=flagged)
            for rank in range(world)
        ]
        if flagged:
            data = 4 * world * self.capacity
            #: [receiver, quarter, sender, word], [receiver, quarter, sender, block]
            self.memory = memory.view(torch.int32)[:, :data].view(world, 4, world, -1)
            self.flags = memory.view(torch.int32)[:, data:].view(world, 4, world, blocks)
        else:
            self.memory = memory.view(torch.int32).view(world, 2, world, -1)

    def put(self, message: torch.Tensor, *, sender: int, receiver: int, launch: int) -> None:
        """What `sender` writes to `receiver` in its launch number `launch`.

        Where blocks are flagged each has a number of its own, the receiver's next one.
        """
        words = message.reshape(-1).view(torch.int32)
        if not self.flagged:
            self.memory[receiver, launch % 2, sender, : len(words)] = words
            return
        counts = self.ranks[receiver].counts.clone()
        for at, piece in enumerate(words.split(FLAGGED_BLOCK)):
            block = at % len(counts)
            counts[block] += 1
            quarter, start = counts[block] % 4, block * FLAGGED_BLOCK
            self.memory[receiver, quarter, sender, start : start + len(piece)] = piece
            self.flags[receiver, quarter, sender, block] = counts[block]

    def sum(self, rank: int, partials: list[torch.Tensor], launch: int, into=None) -> torch.Tensor:
        for sender in set(range(self.world)) - {rank}:
            self.put(partials[sender], sender=sender, receiver=rank, launch=launch)
        own = partials[rank].clone()
        if into is None:
            self.ranks[rank].sum(own)
            return own
        target = into.clone()
        self.ranks[rank].add(own, target)
        return target


def draw(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_rounded(got, expected):
    """Interpreted, float32 numbers are cut off instead of rounded on their way to bfloat16."""
    cut_off = DEVICE.type == "cpu" and got.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2**-7 if cut_off else 1e-6, atol=1e-6)


FORMS = pytest.mark.parametrize("flagged", [False, True], ids=["words", "flagged"])


@FORMS
@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_sum_is_rounded_once_and_the_same_everywhere(world, dtype, flagged):
    peers = Peers(world, flagged=flagged)
    partials = [draw(3, 140, dtype=dtype, seed=rank) for rank in range(world)]
    expected = torch.stack([partial.float() for partial in partials]).sum(0).to(dtype)
    sums = [peers.sum(rank, partials, launch=1) for rank in range(world)]
    for got in sums:
        assert torch.equal(got, sums[0])
    assert_rounded(sums[0], expected)


@FORMS
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_a_sum_meets_the_residual_stream_before_it_is_rounded(dtype, flagged):
    peers = Peers(2, flagged=flagged)
    partials = [draw(2, 64, dtype=dtype, seed=rank) * 2**-9 for rank in range(2)]
    residual = draw(2, 64, dtype=dtype, seed=9)
    expected = (residual.float() + (partials[0].float() + partials[1].float())).to(dtype)
    for rank in range(2):
        assert_rounded(peers.sum(rank, partials, launch=1, into=residual), expected)


def test_the_others_get_the_message_and_empty_its_place():
    peers = Peers(3)
    partials = [draw(1, 20, dtype=torch.float32, seed=rank) for rank in range(3)]
    peers.sum(1, partials, launch=1)
    for receiver in (0, 2):
        words = peers.memory[receiver, 1, 1, :20]
        assert torch.equal(words.view(torch.float32), partials[1][0])
        assert (peers.memory[receiver, 1, 1, 20:] == EMPTY.value).all()
        assert (peers.memory[receiver, 0] == EMPTY.value).all()
    assert (peers.memory[1] == EMPTY.value).all()


@pytest.mark.parametrize("words", [FLAGGED_BLOCK + 1, 3 * FLAGGED_BLOCK, 4 * FLAGGED_BLOCK - 6])
def test_both_forms_of_a_sum_are_bit_by_bit_the_same(words):
    """Also of what is longer than flagged buffers and goes through them in two pieces."""
    flagged, stamped = Peers(2, 2, flagged=True), Peers(2, 4 * FLAGGED_BLOCK // BLOCK)
    for launch in (1, 2):
        partials = [draw(words, 2, dtype=torch.bfloat16, seed=launch + rank) for rank in range(2)]
        residual = draw(words, 2, dtype=torch.bfloat16, seed=9)
        expected = stamped.sum(1, partials, launch=launch, into=residual)
        for rank in range(2):
            got = flagged.sum(rank, partials, launch=launch, into=residual)
            assert torch.equal(got, expected)
            blocks = torch.arange(-(-words // FLAGGED_BLOCK)) % 2
            counts = blocks.bincount(minlength=2) * launch
            assert flagged.ranks[rank].counts.tolist() == counts.tolist()


def test_the_others_get_flagged_words_and_then_the_number_of_the_launch():
    peers = Peers(3, 3, flagged=True)
    partials = [draw(1, FLAGGED_BLOCK + 20, dtype=torch.float32, seed=r) for r in range(3)]
    peers.sum(1, partials, launch=1)
    for receiver in (0, 2):
        words = peers.memory[receiver, 1, 1]
        assert torch.equal(words[: FLAGGED_BLOCK + 20].view(torch.float32), partials[1][0])
        assert (words[FLAGGED_BLOCK + 20 :] == EMPTY.value).all()
        assert peers.flags[receiver, 1, 1].tolist() == [1, 1, EMPTY.value]
        assert (peers.memory[receiver, 0] == EMPTY.value).all()
        assert (peers.flags[receiver, 0] == EMPTY.value).all()
    assert peers.ranks[1].counts.tolist() == [1, 1, 0]


def test_columns_of_ranks_are_gathered_beside_each_other():
    """In more pieces than buffers hold at a time."""
    peers = Peers(2, 2, flagged=True)
    columns = [draw(37, 2 * 90, dtype=torch.bfloat16, seed=rank) for rank in range(2)]
    assert columns[0].nbytes // 4 > peers.capacity
    for rank in range(2):
        peers.put(columns[1 - rank], sender=1 - rank, receiver=rank, launch=1)
        assert torch.equal(peers.ranks[rank].gather(columns[rank]), torch.cat(columns, dim=1))


def test_launches_of_any_sizes_follow_each_other():
    """Blocks count their launches apart: a longer message finds some that were left out."""
    peers = Peers(2, blocks=3)
    launches = [0, 0, 0]
    for turn, words in enumerate((40, 3 * BLOCK, 7, BLOCK, 2 * BLOCK + 1, 3 * BLOCK)):
        partials = [draw(1, words, dtype=torch.float32, seed=10 * turn + r) for r in range(2)]
        for block in range(-(-words // BLOCK)):
            launches[block] += 1
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            message = partials[1][0, part].contiguous().view(torch.int32)
            peers.memory[0, launches[block] % 2, 1, part][: len(message)] = message
        own = partials[0].clone()
        peers.ranks[0].sum(own)
        assert torch.equal(own, partials[0] + partials[1])
    assert peers.ranks[0].counts.tolist() == launches


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("features", [2 * BLOCK, 3 * BLOCK, 90])
def test_a_sum_also_norms_the_stream_that_it_meets(features, weight_dtype):
    """Between sums without a norm, whose programs have other words."""
    peers = Peers(2, blocks=6)
    weight, dtype = draw(features, dtype=weight_dtype, seed=5), torch.float16
    norm, launches = RowNorm(weight, 1e-3), torch.zeros(6, dtype=torch.int64)
    block = BLOCK * triton.next_power_of_2(triton.cdiv(features, 2 * BLOCK))
    for turn, with_norm in enumerate([True, False, True, True]):
        partials = [draw(3, features, dtype=dtype, seed=10 * turn + rank) for rank in range(2)]
        target = draw(3, features, dtype=dtype, seed=9)
        expected = (target.float() + (partials[0].float() + partials[1].float())).to(dtype)
        words = partials[1].view(torch.int32)
        places = torch.arange(words.numel())
        if with_norm:
            places = (torch.arange(3)[:, None] * block + torch.arange(features // 2)).flatten()
        counted = (places // BLOCK).unique()
        if with_norm:
            counted = torch.arange(3 * block // BLOCK)
        launches[counted] += 1
        half = launches[places // BLOCK] % 2
        peers.memory[0, half, 1, places] = words.flatten()
        got = peers.ranks[0].add(partials[0], target, norm if with_norm else None)
        assert torch.equal(target, expected)
        assert peers.ranks[0].counts.tolist() == launches.tolist()
        if with_norm:
            torch.testing.assert_close(got, rms_norm(expected, weight, 1e-3), rtol=2e-3, atol=1e-6)
        else:
            assert got is None
    assert (peers.memory[0] == EMPTY.value).all()


def test_a_row_that_does_not_fit_is_summed_without_its_norm():
    peers = Peers(2, blocks=2)
    partials = [draw(3, 90, dtype=torch.float16, seed=rank) for rank in range(2)]
    peers.put(partials[1], sender=1, receiver=0, launch=1)
    target = torch.zeros_like(partials[0])
    norm = RowNorm(torch.ones(90, dtype=torch.float16, device=DEVICE), 1e-6)
    assert peers.ranks[0].add(partials[0], target, norm) is None
    assert torch.equal(target, partials[0] + partials[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_programs_along_k_have_summed_is_added_up_first(dtype):
    peers, splits = Peers(2), draw(3, 4, 70, dtype=torch.float32, seed=1)
    own = (splits[0] + splits[1] + splits[2]).to(dtype)
    other, target = (draw(4, 70, dtype=dtype, seed=seed) for seed in (2, 3))
    expected = (target.float() + (own.float() + other.float())).to(dtype)
    peers.put(other, sender=1, receiver=0, launch=1)
    peers.ranks[0].add(splits, target)
    assert torch.equal(target, expected)


def test_a_word_that_looks_like_none_is_sent_as_another():
    peers = Peers(2)
    odd = torch.tensor([[EMPTY.value, 3]], dtype=torch.int32, device=DEVICE).view(torch.float32)
    peers.put(torch.ones_like(odd), sender=1, receiver=0, launch=1)
    got = odd.clone()
    peers.ranks[0].sum(got)
    assert got.isnan().tolist() == [[True, False]]
    sent = peers.memory[1, 1, 0, :2]
    assert sent.tolist() == [-1, 3]
    assert sent.view(torch.float32)[0].isnan()


def test_the_leader_tells_its_tokens():
    peers = Peers(3)
    tokens = torch.tensor([7, -1, 131_071, 0], device=DEVICE)
    peers.ranks[0].tell(tokens)
    assert tokens.tolist() == [7, -1, 131_071, 0]
    for rank in (1, 2):
        heard = torch.full((4,), 99, device=DEVICE)
        peers.ranks[rank].tell(heard)
        assert heard.tolist() == [7, -1, 131_071, 0]


def test_what_does_not_fit_is_known_before():
    buffers = Peers(2, blocks=1).ranks[0]
    assert buffers.fit(torch.zeros(BLOCK, dtype=torch.float32))
    assert buffers.fit(torch.zeros(2 * BLOCK, dtype=torch.bfloat16))
    assert not buffers.fit(torch.zeros(BLOCK + 1, dtype=torch.float32))
    assert not buffers.fit(torch.zeros(3, dtype=torch.bfloat16))
    flagged = Peers(2, blocks=1, flagged=True).ranks[0]
    assert flagged.fit(torch.zeros(9 * FLAGGED_BLOCK, dtype=torch.float32))
    assert not flagged.fit(torch.zeros(3, dtype=torch.bfloat16))


@FORMS
def test_bad_numbers_stay_bad(flagged):
    peers = Peers(2, flagged=flagged)
    partials = [torch.tensor([[float("nan"), float("inf")]], device=DEVICE), torch.ones(1, 2)]
    got = peers.sum(0, [partial.to(DEVICE) for partial in partials], launch=1)
    assert got[0, 0].isnan()
    assert got[0, 1] == float("inf")
