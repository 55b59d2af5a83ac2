"""Images on their way from a front end to the engine: tensors of a processor, in a shared file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenpod.core.message import Message
from tokenpod.core.outputs import FailureCode


class RowCount(StrEnum):
    """What says how many rows of embeddings an image becomes, and what stands between them."""

    #: One per square of `merge_size` patches of its grid.
    GRID = "grid"
    #: One per patch of a fixed size, and one for a class token where the tower has one.
    PATCHES = "patches"
    #: A fixed number per tile, tiles side by side: InternVL.
    TILES = "tiles"
    #: The same, each tile behind its name: Aya Vision.
    NAMED_TILES = "named tiles"
    #: The same, each tile behind its line and column: Idefics 3, SmolVLM.
    TILES_IN_LINES = "tiles in lines"
    #: The whole as one tile, then those that it is cut into, without what pads them, and a row
    #: behind each line: LLaVA-NeXT.
    UNPADDED = "unpadded"
    #: The same, scaled down to so many tiles: LLaVA-OneVision.
    UNPADDED_UP_TO = "unpadded, up to"
    #: One per square of patches, and a token behind each line: Pixtral.
    LINES = "lines"
    #: A fixed number: Gemma 3.
    FIXED = "fixed"
    #: As many as the processor says: Gemma 4.
    SAID = "said"
    #: The same: Kimi K2.5.
    MOONVIT = "moonvit"
    #: Tiles behind their line and column, then the whole, each with as many as its size asks for:
    #: LFM2-VL.
    PACKED_TILES = "packed tiles"
    #: A fixed number per tile, and a token behind each: Command A Vision.
    ENDED_TILES = "ended tiles"
    #: One per square of patches: LightOnOCR.
    MERGED = "merged"


class Sight(NamedTuple):
    """How the images of an architecture enter its prompts."""

    rows: RowCount
    #: The field of config.json with the token that has a row of an image each time.
    token: str = "image_token_id"  # noqa: S105 (the name of a field)
    #: What chat templates write once for an image: that token, or the one in this field, or this.
    written: str = ""
    #: Fields of the tokens that the models' chat templates write around an image, or texts where
    #: no field names them; none: they write nothing.
    wrapping: tuple[str, ...] = ()
    #: Fields of the tokens before and behind an image's rows, which templates do not write.
    enclosing: tuple[str, ...] = ()
    #: Text before and behind these.
    spacing: str = ""
    #: Rows bring positions of three axes, by their places in the image.
    axes: bool = False
    #: Arguments of the image processor that transformers' processor of the whole gives it.
    options: Mapping[str, bool] = {}


#: Of Qwen2-VL and what followed it.
_QWEN = Sight(RowCount.GRID, wrapping=("vision_start_token_id", "vision_end_token_id"), axes=True)

_GLM = Sight(RowCount.GRID, wrapping=("image_start_token_id", "image_end_token_id"), axes=True)

_KIMI = ("<|media_begin|>image<|media_content|>", "<|media_end|>")

_IDEFICS = Sight(RowCount.TILES_IN_LINES, options={"return_row_col_info": True})

_CROPPED = {"crop_to_patches": True}

#: Files of a model's folder that say what becomes of an image before its tower: of the first the
#: whole, of the second, which may hold the first, how the rows stand in a prompt.
PROCESSOR = "preprocessor_config.json"
WHOLE_PROCESSOR = "processor_config.json"

#: Architectures whose images are served, as config.json names them.
SIGHTS: Mapping[str, Sight] = {
    "AyaVisionForConditionalGeneration": Sight(
        RowCount.NAMED_TILES, "image_token_index", written="<image>", options=_CROPPED
    ),
    "Cohere2VisionForConditionalGeneration": Sight(RowCount.ENDED_TILES),
    "Gemma3ForConditionalGeneration": Sight(
        RowCount.FIXED,
        "image_token_index",
        written="boi_token_index",
        enclosing=("boi_token_index", "eoi_token_index"),
        spacing="\n\n",
        options={"do_pan_and_scan": False},
    ),
    "Gemma4ForConditionalGeneration": Sight(
        RowCount.SAID, enclosing=("boi_token_id", "eoi_token_id")
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "InternVLForConditionalGeneration": Sight(RowCount.TILES, options=_CROPPED),
    "KimiK25ForConditionalGeneration": Sight(
        RowCount.MOONVIT, "media_placeholder_token_id", wrapping=_KIMI
    ),
    "Kimi_K25ForConditionalGeneration": Sight(RowCount.MOONVIT, wrapping=_KIMI),
    "Lfm2VlForConditionalGeneration": Sight(RowCount.PACKED_TILES),
    "LightOnOcrForConditionalGeneration": Sight(RowCount.MERGED),
    "LlavaForConditionalGeneration": Sight(RowCount.PATCHES, "image_token_index"),
    "LlavaNextForConditionalGeneration": Sight(
        RowCount.UNPADDED, "image_token_index", options={"do_pad": True}
    ),
    "LlavaOnevisionForConditionalGeneration": Sight(RowCount.UNPADDED_UP_TO, "image_token_index"),
    "Mistral3ForConditionalGeneration": Sight(RowCount.LINES, "image_token_index"),
    "PaliGemmaForConditionalGeneration": Sight(RowCount.PATCHES, "image_token_index"),
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "SmolVLMForConditionalGeneration": _IDEFICS,
    "Glm4vForConditionalGeneration": _GLM,
    "Glm46VForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
}


def processor_of(folder: Path) -> dict[str, Any] | None:
    """The settings of a folder's image processor; None: it has none, or none that is JSON."""
    for name in (WHOLE_PROCESSOR, PROCESSOR):
        try:
            found = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        # As newer files have it, within the processor of the whole.
        found = found.get("image_processor") if name == WHOLE_PROCESSOR else found
        if isinstance(found, dict):
            return found
    return None


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
