"""Collectives through peers' memory. Here all ranks' buffers are this process's memory.

Interpreted kernels run one after the other, and each would wait for the next rank's message. So the
messages that a rank receives are put into its buffer beforehand, as their senders would write them.
"""

from __future__ import annotations

import pytest
import torch

from support.kernels.interpreted import DEVICE
from tokenpod.kernels.gpu.peers import BLOCK, EMPTY, EMPTY_PAIR, SymmetricBuffers

WORDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2}


class Peers:
    """Ranks with buffers."""

    def __init__(self, world: int, blocks: int = 2) -> None:
        self.world, self.capacity = world, blocks * BLOCK
        words = SymmetricBuffers.words(world, self.capacity)
        memory = torch.full((world, words), EMPTY_PAIR, dtype=torch.int64, device=DEVICE)
        addresses = [buffer.data_ptr() for buffer in memory]
        self.ranks = [
            SymmetricBuffers.at(addresses, rank, self.capacity, DEVICE) for rank in range(world)
        ]
        #: [receiver, half, sender, word]
        self.memory = memory.view(torch.int32).view(world, 2, world, -1)

    def put(self, message: torch.Tensor, *, sender: int, receiver: int) -> None:
        """What `sender` writes to `receiver`, if it has launched as often.

        Of as many words as buffers hold in two launches.
        """
        words, size = message.reshape(-1).view(torch.int32), self.capacity
        places = torch.arange(len(words), device=DEVICE)
        counts = self.ranks[receiver].counts
        launch = counts[places % size // BLOCK] + 1 + places // size
        self.memory[receiver, launch % 2, sender, places % size] = words

    def sum(self, rank: int, partials: list[torch.Tensor], into=None) -> torch.Tensor:
        for sender in set(range(self.world)) - {rank}:
            self.put(partials[sender], sender=sender, receiver=rank)
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


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_sum_is_rounded_once_and_the_same_everywhere(world, dtype):
    peers = Peers(world)
    partials = [draw(3, 140, dtype=dtype, seed=rank) for rank in range(world)]
    expected = torch.stack([partial.float() for partial in partials]).sum(0).to(dtype)
    sums = [peers.sum(rank, partials) for rank in range(world)]
    for got in sums:
        assert torch.equal(got, sums[0])
    assert_rounded(sums[0], expected)


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_a_sum_meets_the_residual_stream_before_it_is_rounded(dtype):
    peers = Peers(2)
    partials = [draw(2, 64, dtype=dtype, seed=rank) * 2**-9 for rank in range(2)]
    residual = draw(2, 64, dtype=dtype, seed=9)
    expected = (residual.float() + (partials[0].float() + partials[1].float())).to(dtype)
    for rank in range(2):
        assert_rounded(peers.sum(rank, partials, into=residual), expected)


def test_the_others_get_the_message_and_empty_its_place():
    peers = Peers(3)
    partials = [draw(1, 20, dtype=torch.float32, seed=rank) for rank in range(3)]
    peers.sum(1, partials)
    for receiver in (0, 2):
        words = peers.memory[receiver, 1, 1, :20]
        assert torch.equal(words.view(torch.float32), partials[1][0])
        assert (peers.memory[receiver, 1, 1, 20:] == EMPTY.value).all()
        assert (peers.memory[receiver, 0] == EMPTY.value).all()
    assert (peers.memory[1] == EMPTY.value).all()


@pytest.mark.parametrize("words", [2 * BLOCK + 2, 4 * BLOCK])
def test_what_is_longer_than_the_buffer_takes_several_launches(words):
    small, large = Peers(2, 2), Peers(2, 4)
    for _ in range(2):
        partials = [draw(words, 2, dtype=torch.bfloat16, seed=rank) for rank in range(2)]
        residual = draw(words, 2, dtype=torch.bfloat16, seed=9)
        expected = large.sum(1, partials, into=residual)
        for rank in range(2):
            assert torch.equal(small.sum(rank, partials, into=residual), expected)
    assert small.ranks[0].counts.max() == 4


def test_columns_of_ranks_are_gathered_beside_each_other():
    """Of more rows than buffers hold at a time."""
    columns = [draw(16, 2 * 90, dtype=torch.bfloat16, seed=rank) for rank in range(2)]
    peers = Peers(2, 2)
    peers.capacity = 990  # 11 rows
    for rank in range(2):
        peers.put(columns[1 - rank], sender=1 - rank, receiver=rank)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_programs_along_k_have_summed_is_added_up_first(dtype):
    peers, splits = Peers(2), draw(3, 4, 70, dtype=torch.float32, seed=1)
    own = (splits[0] + splits[1] + splits[2]).to(dtype)
    other, target = (draw(4, 70, dtype=dtype, seed=seed) for seed in (2, 3))
    expected = (target.float() + (own.float() + other.float())).to(dtype)
    peers.put(other, sender=1, receiver=0)
    peers.ranks[0].add(splits, target)
    assert torch.equal(target, expected)


def test_a_word_that_looks_like_none_is_sent_as_another():
    peers = Peers(2)
    odd = torch.tensor([[EMPTY.value, 3]], dtype=torch.int32, device=DEVICE).view(torch.float32)
    peers.put(torch.ones_like(odd), sender=1, receiver=0)
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


def test_bad_numbers_stay_bad():
    peers = Peers(2)
    partials = [torch.tensor([[float("nan"), float("inf")]], device=DEVICE), torch.ones(1, 2)]
    got = peers.sum(0, [partial.to(DEVICE) for partial in partials])
    assert got[0, 0].isnan()
    assert got[0, 1] == float("inf")
