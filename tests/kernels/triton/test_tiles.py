"""The table of tiles."""

from __future__ import annotations

import pytest

from tokenpod.kernels.products.product_tiles import LIBRARY, Kind, Tile, measured, parse
from tokenpod.kernels.products.quantised import quantised_tiles

SMALL = {"kind": "multiply_add", "block_n": 4, "block_k": 512}
TABLE = {
    "shapes": [{"n": 6, "k": 8, "tiles": [{"rows": 4, "kind": "library"}, {"rows": 1, **SMALL}]}],
    "otherwise": [{"rows": 2, "kind": "matrix", "block_n": 16, "block_k": 64, "stages": 3}],
}


def test_the_first_tile_for_that_many_rows_or_more():
    tiles = parse(TABLE)
    assert tiles.choose(6, 8, 1) == Tile(Kind.MULTIPLY_ADD, block_n=4, block_k=512)
    assert tiles.choose(6, 8, 2).kind is Kind.LIBRARY
    assert tiles.choose(6, 8, 5) == LIBRARY


def test_a_shape_nobody_measured_gets_the_general_choice():
    tiles = parse(TABLE)
    assert tiles.choose(8, 6, 2) == Tile(Kind.MATRIX, block_n=16, block_k=64, stages=3)
    assert tiles.choose(8, 6, 3) == LIBRARY


def test_our_kernels_can_be_asked_for_where_the_library_is_faster():
    general = {"kind": "matrix", "block_n": 16, "block_k": 64}
    shape = {**TABLE["shapes"][0], "tiles": [{"rows": 1, **SMALL}, {"rows": 8, "kind": "library"}]}
    tiles = parse({"shapes": [shape], "otherwise": [{"rows": 4, **general}]})
    assert tiles.choose_own(6, 8, 1) == tiles.choose(6, 8, 1)
    assert tiles.choose(6, 8, 3) == LIBRARY
    assert tiles.choose_own(6, 8, 3) == Tile(Kind.MATRIX, block_n=16, block_k=64)
    assert tiles.choose_own(6, 8, 5) == LIBRARY


def test_a_kernel_nobody_wrote_is_refused():
    with pytest.raises(ValueError, match="'cublas' is not a valid Kind"):
        parse({"shapes": [], "otherwise": [{"rows": 1, "kind": "cublas"}]})


@pytest.mark.parametrize("capability", [(9, 0), (8, 9), None], ids=str)
def test_the_package_carries_a_table(capability):
    tiles = measured(capability)
    assert tiles.choose(6144, 4096, 4096) == LIBRARY
    assert tiles.choose(6144, 4096, 1).kind is not Kind.LIBRARY


def test_what_was_measured_on_one_generation_is_not_used_on_another():
    assert measured((8, 9)).by_shape == {}
    # A program has 99 KiB there, and 227 KiB on the other.
    for capability, most in (((8, 9), 99), ((9, 0), 227)):
        for rows, tile in measured(capability).otherwise:
            step = (tile.block_n + max(16, rows)) * tile.block_k * 2
            assert tile.kind is Kind.MULTIPLY_ADD or step * tile.stages <= most * 1024


@pytest.mark.parametrize("capability", [(9, 0), (8, 9)], ids=str)
def test_two_tokens_or_more_take_the_matrix_unit(capability):
    # In ordinary arithmetic four took 1.7 to 2.0 times the best of a weight's tiles.
    tiles = measured(capability)
    assert [tiles.choose(12352, 4096, rows).kind for rows in (2, 4, 16)] == [Kind.MATRIX] * 3


def test_every_format_and_shape_has_tiles_of_its_own_for_few_tokens_and_one_for_any_number():
    tiles = quantised_tiles.measured((9, 0))
    for which, rows in {**tiles.by_kind, **tiles.by_shape}.items():
        fewest, most = rows[0][0], rows[-1][0]
        assert (fewest <= 16, most) == (True, 1_000_000), which
