"""What is decided on the host: tiles of extending rows, splits of decoding ones."""

from __future__ import annotations

import random
from bisect import bisect

import pytest
import torch

from support.kernels.attention_steps import Spec, lay_out
from tokenpod.kernels.attention.attention_decode import choose_splits
from tokenpod.kernels.attention.attention_plan import cut_rows, list_tiles
from tokenpod.kernels.attention.attention_tiles import DecodeTile, extend_tile_for, tiles_for
from tokenpod.kernels.attention.triton_attention import LARGEST_GROUP
from tokenpod.kernels.operations.batch import RaggedRows

CPU = torch.device("cpu")
TILE = DecodeTile(block=64, warps=4, stages=3, programs=4)


def test_tiles_cover_every_query_once_with_the_heaviest_first():
    batch = lay_out([Spec(1, 50), Spec(70, 70), Spec(33, 500), Spec(2, 2)], CPU).batch
    tiles = list_tiles(batch, None, 32)
    assert len(tiles.scattered) == 0
    listed = tiles.contiguous.tolist()
    covered = [t for token, count, *_ in listed for t in range(token, token + count)]
    assert sorted(covered) == list(range(1, 1 + 70 + 33 + 2))
    reach = [position + count for _, count, position, _ in listed]
    assert reach == sorted(reach, reverse=True)


def test_a_tile_names_the_slot_of_position_zero_or_its_row_of_the_table():
    batch = lay_out([Spec(20, 20), Spec(20, 60, piece=35)], CPU).batch
    tiles = list_tiles(batch, None, 16)
    assert tiles.contiguous[:, 3].tolist() == [batch.b_runs[0][0][0]] * 2
    assert tiles.scattered[:, 3].tolist() == [batch.b_row[1]] * 2


def test_a_window_within_one_run_makes_a_tile_contiguous():
    """Positions 40 to 59 see 36 and later; the second run holds 35 to 59."""
    batch = lay_out([Spec(20, 60, piece=35)], CPU).batch
    tiles = list_tiles(batch, 5, 16)
    assert len(tiles.scattered) == 0
    assert tiles.contiguous[:, 3].tolist() == [batch.b_runs[0][1][0] - 35] * 2


def test_padding_has_no_tiles():
    batch = lay_out([Spec(1, 9), Spec(2, 0), Spec(2, 4)], CPU).batch
    tiles = list_tiles(batch, None, 16)
    assert len(tiles.contiguous) + len(tiles.scattered) == 1


@pytest.mark.parametrize("seed", range(40))
def test_tiles_of_any_rows_name_where_their_keys_lie(seed):
    """Queries are cut once; what is contiguous lies where it says; what is noted in part is not."""
    draw = random.Random(seed)
    start, context, runs, places = [0], [], [], []
    for _ in range(draw.randrange(1, 6)):
        tokens = draw.choice([1, 2, 15, 16, 17, 70])
        start.append(start[-1] + tokens)
        context.append(tokens + draw.choice([0, 0, 1, 5, 90]))
        noted = context[-1] if draw.random() < 0.8 else draw.randrange(context[-1])
        cuts = sorted({0, noted, *(draw.randrange(noted + 1) for _ in range(draw.randrange(3)))})
        at = [draw.randrange(1000) * 1000 for _ in cuts[1:]]
        runs.append([(a, a + j - i) for a, i, j in zip(at, cuts, cuts[1:], strict=False)])
        places.append([slot for run in runs[-1] for slot in range(*run)])
    rows = RaggedRows(start, context, runs, draw.sample(range(50), len(context)), 0)
    window, queries = draw.choice([None, 1, 5, 16, 60]), draw.choice([1, 4, 16])
    causal = draw.random() < 0.5
    contiguous, scattered = cut_rows(rows, window, queries, causal=causal)
    covered = []
    for tile in [*contiguous.tolist(), *scattered.tolist()]:
        token, count, position, source = tile[:4]
        covered += range(token, token + count)
        row = bisect(start, token) - 1
        assert position == context[row] - start[row + 1] + token
        first = 0 if window is None else max(position - window + 1, 0)
        last = position + count
        if not causal:
            last = min(last + (window or last + context[row]) - 1, context[row])
            assert tile[4] == last
        keys, slots = range(first, last), places[row]
        whole = len(slots) == context[row]
        lies = whole and [slots[key] for key in keys] == [slots[first] - first + k for k in keys]
        assert source == (slots[first] - first if lies else rows.b_row[row])
    assert sorted(covered) == [*range(start[-1])]


@pytest.mark.parametrize(
    ("rows", "kv_heads", "splits"),
    [(1, 8, TILE.most_splits), (16, 8, 4), (256, 8, 1), (1, 1, TILE.most_splits)],
)
def test_shares_fill_the_processors(rows, kv_heads, splits):
    assert choose_splits(rows, kv_heads, 132, TILE) == splits


@pytest.mark.parametrize(
    ("window", "splits"), [(1, 1), (2 * TILE.block, 2), (200, 4), (10**6, None)]
)
def test_no_share_of_a_window_is_empty(window, splits):
    expected = TILE.most_splits if splits is None else splits
    assert choose_splits(1, 8, 132, TILE, window) == expected


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_size_has_tiles_on_every_gpu(head_dim, dtype, capability):
    tiles = tiles_for(head_dim, dtype, capability)
    for group in (1, 16, 71, LARGEST_GROUP):  # a query's heads
        tile = extend_tile_for(head_dim, dtype, capability, group)
        assert tile.block_m >= group
        assert tile.block_n >= 16
        assert group > tiles.extend.block_m or tile == tiles.extend
