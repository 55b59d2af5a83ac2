"""Images that a gateway has prepared: tensors for the model's tower, checked before anything runs.

What a caller says of a tensor is a claim: its type, its shape and its numbers decide what a tower
computes, and where it reads (CVE-2025-62164 began with a shape that lied). So each is held against
what the model's own processor makes, and against how many bytes and tokens there are. A caller's
hash of an image is no key of ours: whoever says another's would get, or give, another's rows.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tokenpod.core.images import RowCount, TensorPlace
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenTensor, GivenTensors
from tokenpod.service.images.image_messages import TensorShapes
from tokenpod.service.images.image_workers import TensorFile

Numbers = npt.NDArray[Any]

#: numpy's names of the types that are taken; bfloat16, which it has not, is widened.
_TYPES: Final = {
    **{"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"},
    **{"int64": "<i8", "int32": "<i4", "uint32": "<u4"},
}
_MOST_AXES: Final = 6
#: The tensors of an image, by how its rows are counted: integers besides pixels.
_GRID = "image_grid_thw"
_BESIDE: Final[Mapping[RowCount, tuple[str, ...]]] = {
    RowCount.GRID: (_GRID,),
    RowCount.PATCHES: (),
    RowCount.FIXED: (),
}
PIXELS: Final = "pixel_values"


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """One image's tensors.

    Args:
        key: of what they hold.
        rows: tokens that stand for it.
        grid: as `PreparedImage` has it.
        file: with the tensors.
    """

    key: bytes
    rows: int
    grid: tuple[int, ...]
    file: TensorFile


def check_tensors(
    given: GivenTensors,
    prompt: Sequence[int],
    token_id: int,
    shapes: TensorShapes,
    *,
    most: int,
    axes: bool,
) -> Iterator[CheckedImage]:
    """The images of a call, one by one; who gets one closes its file.

    Args:
        given: as they came.
        prompt: the call's tokens.
        token_id: has a row of an image each time.
        shapes: of what the model's processor makes.
        most: images of a request.
        axes: rows bring positions.

    Raises InvalidArgument, which names the first tensor that lies.
    """
    at, count = given.field, len(given.places)
    if count > most:
        problem = f"has {count} images; this server allows {most} (--max-images)"
        raise InvalidArgument(f"{at}.mm_placeholders", problem)
    if not count:
        raise InvalidArgument(f"{at}.mm_placeholders", "is empty: there are tensors of no image")
    if shapes.rows not in _BESIDE:
        raise InvalidArgument(at, "is not supported for this model: images as files are")
    rows = [*_places(given, prompt, token_id)]
    names = (PIXELS, *_BESIDE[shapes.rows])
    for name in given.tensors:
        if name not in names:
            raise InvalidArgument(_field(given, name), f"is none of {', '.join(names)}")
    for name in names:
        if name not in given.tensors:
            raise InvalidArgument(_field(given, name), "is missing")
    whole = {name: _read(given.tensors[name], _field(given, name)) for name in names}
    pixels, field = whole[PIXELS], _field(given, PIXELS)
    if shapes.rows is RowCount.GRID:
        parts = _of_grids(given, whole, rows, shapes)
    else:
        _shaped(pixels, (count, 3, shapes.side, shapes.side), field)
        for image, found in enumerate(rows):
            _as_many(given, image, found, shapes.most_rows)
        parts = [{PIXELS: pixels[image : image + 1]} for image in range(count)]
    for tensors, found in zip(parts, rows, strict=True):
        grid: tuple[int, ...] = ()
        if axes:
            _, height, width = tensors[_GRID].reshape(-1).tolist()
            grid = height // shapes.merge, width // shapes.merge
        yield CheckedImage(_key(tensors), found, grid, _written(tensors, found, grid))


def _places(given: GivenTensors, prompt: Sequence[int], token_id: int) -> Iterator[int]:
    """How many tokens stand for each image."""
    end, at = 0, f"{given.field}.mm_placeholders"
    for number, (offset, length) in enumerate(given.places):
        field = f"{at}[{number}]"
        if not length or offset < end or offset + length > len(prompt):
            problem = f"is {offset} to {offset + length}; places rise, within {len(prompt)} tokens"
            raise InvalidArgument(field, problem)
        end = offset + length
        if any(token != token_id for token in prompt[offset:end]):
            raise InvalidArgument(
                field, f"has other tokens than {token_id}, the model's for images"
            )
        yield length


def _of_grids(
    given: GivenTensors,
    whole: Mapping[str, Numbers],
    rows: Sequence[int],
    shapes: TensorShapes,
) -> list[dict[str, Numbers]]:
    """Patches of all images behind each other, and how many each has."""
    grids, field = whole[_GRID], _field(given, _GRID)
    _shaped(grids, (len(rows), 3), field)
    counts = []
    for image, found in enumerate(rows):
        time, height, width = map(int, grids[image])
        merge = shapes.merge
        if time != 1 or min(height, width) < 1 or height % merge or width % merge:
            problem = f"has {time} x {height} x {width}: one image is 1 x multiples of {merge}"
            raise InvalidArgument(field, problem)
        if height * width // merge**2 > shapes.most_rows:
            problem = f"has {height} x {width} patches; this model has {shapes.most_rows} tokens"
            raise InvalidArgument(field, f"{problem} of an image at most")
        _as_many(given, image, found, height * width // merge**2)
        counts.append(height * width)
    pixels = whole[PIXELS]
    _shaped(pixels, (sum(counts), shapes.patch), _field(given, PIXELS))
    ends = np.cumsum(counts).tolist()
    return [
        {PIXELS: pixels[end - count : end], _GRID: grids[image : image + 1]}
        for image, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def _as_many(given: GivenTensors, image: int, placed: int, made: int) -> None:
    if placed != made:
        problem = f"has {placed} tokens for an image of {made}"
        raise InvalidArgument(f"{given.field}.mm_placeholders[{image}]", problem)


def _shaped(numbers: Numbers, shape: tuple[int, ...], field: str) -> None:
    if numbers.shape != shape:
        raise InvalidArgument(field, f"has the shape {[*numbers.shape]}, not {[*shape]}")


def _read(tensor: GivenTensor, field: str) -> Numbers:
    """Its numbers, of which none is NaN or Inf; integers are 64 bits wide, others 32."""
    kind = _TYPES.get(tensor.dtype)
    if kind is None:
        raise InvalidArgument(field, f"has the dtype {tensor.dtype!r:.40}, none of {[*_TYPES]}")
    shape = tensor.shape
    if len(shape) > _MOST_AXES:
        raise InvalidArgument(field, f"has {len(shape)} axes; {_MOST_AXES} are allowed")
    # Of Python's integers, which have no end: a product can't wrap around.
    size = math.prod(shape) * np.dtype(kind).itemsize
    if size != len(tensor.data):
        problem = f"has {len(tensor.data)} bytes; {tensor.dtype} of {[*shape]} takes {size}"
        raise InvalidArgument(field, problem)
    numbers = np.frombuffer(tensor.data, kind).reshape(shape)
    if tensor.dtype == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    is_pixels = field.endswith(PIXELS)
    if is_pixels is not (numbers.dtype.kind == "f"):
        raise InvalidArgument(field, f"is of {tensor.dtype}")
    if not is_pixels:
        return numbers.astype(np.int64)
    if not np.isfinite(numbers).all():
        raise InvalidArgument(field, "has numbers that are NaN or infinite")
    return numbers.astype(np.float32)


def _field(given: GivenTensors, name: str) -> str:
    if name == PIXELS:
        return f"{given.field}.{PIXELS}"
    return f"{given.field}.model_specific_tensors[{name}]"


def _key(tensors: Mapping[str, Numbers]) -> bytes:
    digest = hashlib.sha256(b"tensors")
    for name, numbers in tensors.items():
        digest.update(f"{name} {numbers.shape} ".encode())
        digest.update(np.ascontiguousarray(numbers).data)
    return digest.digest()


def _written(tensors: Mapping[str, Numbers], rows: int, grid: tuple[int, ...]) -> TensorFile:
    descriptor, at = os.memfd_create("tokenpod-image", os.MFD_CLOEXEC), 0
    places = []
    for name, numbers in tensors.items():
        places.append(TensorPlace(name, numbers.dtype.name, [*numbers.shape], at))
        data = memoryview(np.ascontiguousarray(numbers).data).cast("B")
        while data:
            done = os.pwrite(descriptor, data, at)
            data, at = data[done:], at + done
    return TensorFile(descriptor, at, places, (("", rows),), grid)
