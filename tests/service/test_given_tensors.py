"""Tensors that a gateway has made of images: what lies about itself is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tokenpod.core.images import RowCount
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenTensor, GivenTensors
from tokenpod.service.images.given_tensors import CheckedImage, check_tensors
from tokenpod.service.images.image_messages import TensorShapes

TOKEN = 9
GRIDS = TensorShapes(RowCount.GRID, patch=12, merge=2, most_rows=6)
SQUARES = TensorShapes(RowCount.FIXED, side=4, most_rows=3)
#: Of two images with 2 and 4 rows.
PROMPT = [1, 9, 9, 2, 9, 9, 9, 9, 3]
PLACES = [(1, 2), (4, 4)]
GRID = np.array([[1, 2, 4], [1, 4, 4]], np.int64)
PATCHES = np.arange(24 * 12, dtype=np.float32).reshape(24, 12)


def tensor(numbers: np.ndarray, **said: Any) -> GivenTensor:
    made = GivenTensor(numbers.dtype.name, numbers.shape, numbers.tobytes())
    return replace(made, **said)


def given(places: Any = PLACES, **tensors: GivenTensor) -> GivenTensors:
    right = {"pixel_values": tensor(PATCHES), "image_grid_thw": tensor(GRID)}
    found = {name: x for name, x in (right | tensors).items() if x is not NOTHING}
    return GivenTensors(found, places, "mm_inputs")


NOTHING: Any = None
PIXELS, THW = "mm_inputs.pixel_values", "mm_inputs.model_specific_tensors[image_grid_thw]"


def check(
    images: GivenTensors, shapes: TensorShapes = GRIDS, prompt: list[int] = PROMPT
) -> list[CheckedImage]:
    found = [*check_tensors(images, prompt, TOKEN, shapes, most=2, axes=shapes is GRIDS)]
    for image in found:
        image.file.close()
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_are_divided_among_images(dtype: str) -> None:
    pixels = tensor(PATCHES)
    if dtype == "float16":
        pixels = tensor(PATCHES.astype(np.float16))
    if dtype == "bfloat16":
        halves = (PATCHES.view(np.uint32) >> 16).astype(np.uint16)
        pixels = tensor(halves, dtype="bfloat16")
    one, two = check(given(pixel_values=pixels))
    assert [(image.rows, image.grid) for image in (one, two)] == [(2, (1, 2)), (4, (2, 2))]
    shapes = {place.name: place.shape for place in two.file.tensors}
    assert shapes == {"pixel_values": [16, 12], "image_grid_thw": [1, 3]}
    assert two.file.tensors[0].dtype == "float32"
    assert one.key != two.key
    # Equal tensors have equal keys, whatever a caller calls them.
    assert one.key == check(given(pixel_values=pixels))[0].key


def test_squares_are_what_the_tower_takes() -> None:
    squares = np.zeros((2, 3, 4, 4), np.float32)
    images = given([(0, 3), (4, 3)], pixel_values=tensor(squares), image_grid_thw=NOTHING)
    prompt = [9, 9, 9, 1, 9, 9, 9]
    assert [image.rows for image in check(images, SQUARES, prompt)] == [3, 3]
    with pytest.raises(InvalidArgument, match="has 2 tokens for an image of 3"):
        check(replace(images, places=[(0, 3), (4, 2)]), SQUARES, prompt)
    wide = tensor(np.zeros((2, 3, 4, 8), np.float32))
    tensors = {"pixel_values": wide}
    with pytest.raises(InvalidArgument, match=r"has the shape \[2, 3, 4, 8\], not \[2, 3, 4, 4\]"):
        check(replace(images, tensors=tensors), SQUARES, prompt)


def cut(array: np.ndarray, at: tuple[int, int], value: Any) -> GivenTensor:
    changed = array.copy()
    changed[at] = value
    return tensor(changed)


LIES: dict[str, tuple[GivenTensors, str, str]] = {
    "short": (
        given(pixel_values=tensor(PATCHES, data=bytes(8))),
        PIXELS,
        "has 8 bytes; float32 of [24, 12] takes 1152",
    ),
    "other shape": (
        given(pixel_values=tensor(PATCHES, shape=(12, 24))),
        PIXELS,
        "has the shape [12, 24], not [24, 12]",
    ),
    "vast": (
        given(pixel_values=tensor(PATCHES, shape=(1 << 32, 1 << 31, 2))),
        PIXELS,
        "has 1152 bytes; float32 of",
    ),
    "zero": (given(pixel_values=tensor(PATCHES[:0])), PIXELS, "has the shape [0, 12]"),
    "axes": (given(pixel_values=tensor(PATCHES, shape=(1,) * 5 + (24, 12))), PIXELS, "7 axes"),
    "dtype": (given(pixel_values=tensor(PATCHES, dtype="object")), PIXELS, "the dtype 'object'"),
    "integers": (given(pixel_values=tensor(PATCHES.astype(np.int32))), PIXELS, "is of int32"),
    "nan": (given(pixel_values=cut(PATCHES, (3, 3), np.nan)), PIXELS, "NaN or infinite"),
    "inf": (given(pixel_values=cut(PATCHES, (3, 3), np.inf)), PIXELS, "NaN or infinite"),
    "missing": (given(image_grid_thw=NOTHING), THW, "is missing"),
    "grid of floats": (given(image_grid_thw=tensor(GRID.astype(np.float32))), THW, "is of float32"),
    "grid": (given(image_grid_thw=cut(GRID, (0, 1), 3)), THW, "has 1 x 3 x 4: one image is 1 x"),
    "time": (given(image_grid_thw=cut(GRID, (0, 0), 2)), THW, "has 2 x 2 x 4"),
    "below": (given(image_grid_thw=cut(GRID, (0, 1), -2)), THW, "has 1 x -2 x 4"),
    "large": (given(image_grid_thw=cut(GRID, (1, 2), 40)), THW, "this model has 6 tokens of an"),
    "other grid": (
        given(image_grid_thw=cut(GRID, (1, 2), 6)),
        "mm_inputs.mm_placeholders[1]",
        "has 4 tokens for an image of 6",
    ),
    "unknown": (
        given(position_ids=tensor(GRID)),
        "mm_inputs.model_specific_tensors[position_ids]",
        "is none of pixel_values, image_grid_thw",
    ),
    "outside": (given([(1, 2), (8, 4)]), "mm_inputs.mm_placeholders[1]", "places rise, within 9"),
    "overlap": (given([(1, 2), (2, 4)]), "mm_inputs.mm_placeholders[1]", "is 2 to 6; places rise"),
    "text": (given([(1, 3), (4, 4)]), "mm_inputs.mm_placeholders[0]", "has other tokens than 9"),
    "empty": (given([(1, 0), (4, 4)]), "mm_inputs.mm_placeholders[0]", "is 1 to 1"),
    "none": (given([]), "mm_inputs.mm_placeholders", "is empty"),
    "many": (given(PLACES * 2), "mm_inputs.mm_placeholders", "has 4 images; this server allows 2"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_lies_is_refused_by_its_name(lie: str) -> None:
    images, field, problem = LIES[lie]
    with pytest.raises(InvalidArgument) as refused:
        check(images)
    assert refused.value.message.startswith(f"{field} ")
    assert problem in refused.value.message


def test_tensors_of_other_towers_are_not_taken() -> None:
    with pytest.raises(InvalidArgument, match="mm_inputs is not supported for this model"):
        check(given(), TensorShapes(RowCount.TILES))
