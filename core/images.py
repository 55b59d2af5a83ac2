"""Images on their way from a front end to the engine: tensors of a processor, in a shared file."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from tokenpod.core.message import Message
from tokenpod.core.outputs import FailureCode


class RowCount(StrEnum):
    """What says how many rows of embeddings an image becomes."""

    #: One per square of `merge_size` patches of its grid.
    GRID = "grid"
    #: One per patch of a fixed size, and one for a class token where the tower has one.
    PATCHES = "patches"


class Sight(NamedTuple):
    """How the images of an architecture enter its prompts."""

    rows: RowCount
    #: The field of config.json with the token that has a row of an image each time. Chat templates
    #: write it once for an image.
    token: str = "image_token_id"  # noqa: S105 (the name of a field)
    #: Fields of the tokens that the models' chat templates write around an image; none: they write
    #: nothing.
    wrapping: tuple[str, ...] = ()
    #: Rows bring positions of three axes, by their places in the image.
    axes: bool = False


#: Of Qwen2-VL and what followed it.
_QWEN = Sight(RowCount.GRID, wrapping=("vision_start_token_id", "vision_end_token_id"), axes=True)

_GLM = Sight(RowCount.GRID, wrapping=("image_start_token_id", "image_end_token_id"), axes=True)

#: The file of a model's folder that says what becomes of an image before its tower.
PROCESSOR = "preprocessor_config.json"

#: Architectures whose images are served, as config.json names them.
SIGHTS: Mapping[str, Sight] = {
    "LlavaForConditionalGeneration": Sight(RowCount.PATCHES, "image_token_index"),
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "Glm4vForConditionalGeneration": _GLM,
    "Glm46VForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
}


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a file: contiguous, little-endian."""

    #: The processor's, such as "pixel_values".
    name: str
    #: numpy's name of the type.
    dtype: str
    shape: list[int]
    #: Bytes before it.
    offset: int


class PreparedImage(msgspec.Struct, frozen=True, array_like=True):
    """One image for the model's tower."""

    #: SHA-256 of its bytes and of the processor's settings: equal keys, equal rows.
    key: bytes
    #: Tokens that stand for it in a prompt, one row of embeddings each.
    rows: int
    #: How many rows lie above and beside each other, if they bring positions; else empty.
    grid: tuple[int, ...] = ()
    #: Of the sending process, the descriptor of the file with the tensors; -1: none is sent, since
    #: the rows may still be known.
    descriptor: int = -1
    tensors: tuple[TensorPlace, ...] = ()


class EncodeImages(Message, frozen=True, array_like=True, tag=True):
    """Compute the rows of a request's images, and keep them for it; one `ImagesEncoded` follows.

    The rows are kept until a `Request` names op, or until `DropImages`.
    """

    #: Names it, as a sequence is named: modulo the number of front ends, whose it is.
    op: int
    #: The sending process, of which the descriptors are.
    process: int
    images: list[PreparedImage]


class ImagesEncoded(Message, frozen=True, array_like=True, tag=True):
    """What became of `EncodeImages`: all rows are kept for op, or none is."""

    op: int
    #: Keys of images that came without tensors, and whose rows are not known.
    missing: tuple[bytes, ...] = ()
    #: The tower failed, or there is none.
    failure: FailureCode | None = None
    message: str = ""


class DropImages(Message, frozen=True, array_like=True, tag=True):
    """Nobody asks for the rows of op any more. Ones that a `Request` has named are fine."""

    op: int
